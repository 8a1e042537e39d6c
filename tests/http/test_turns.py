"""However much is ready at once, one pass of the loop does a few pieces of it."""

from collections import Counter

import pytest
import trio

from relay.http.app import observe_tokens
from relay.http.turns import Turns
from relay.ledger.metrics import GatewayMetrics


@pytest.fixture(autouse=True)
def _law_of_blocks() -> None:
    """No server, no blocks."""


class Passes(trio.abc.Instrument):
    """Counts how often the loop has begun anew."""

    n = 0

    def before_io_wait(self, timeout: float) -> None:
        self.n += 1


def test_of_a_thousand_that_come_together_one_pass_serves_a_few() -> None:
    passes, served = Passes(), list[int]()
    turns = Turns(4)

    async def client() -> None:
        await turns.next()
        served.append(passes.n)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            for _ in range(1000):
                nursery.start_soon(client)

    trio.run(main, instruments=[passes])
    assert max(Counter(served).values()) == 4
    assert len(served) == 1000


def test_long_work_lets_others_run_between_its_pieces() -> None:
    passes = Passes()

    async def main() -> None:
        pace = Turns().pace()
        start = passes.n
        for _ in range(10_000_000):
            await pace.breathe()
            if passes.n == start + 3:
                return
        raise AssertionError("no other task could run")

    trio.run(main, instruments=[passes])


def test_who_leaves_while_waiting_takes_no_turn_from_others() -> None:
    async def main() -> None:
        turns = Turns(1)
        async with trio.open_nursery() as nursery:
            with trio.CancelScope() as scope:
                scope.cancel()
                await turns.next()
            nursery.start_soon(turns.next)
            await turns.next()

    trio.run(main)


def test_the_times_of_a_hundred_thousand_tokens_are_observed_between_the_turns_of_others() -> None:
    passes, metrics = Passes(), GatewayMetrics()

    async def main() -> None:
        start = passes.n
        await observe_tokens(metrics, 0, [list(range(50_000))] * 2, Turns().pace())
        assert passes.n >= start + 3

    trio.run(main, instruments=[passes])
    (itl,) = metrics.itl.collect()
    assert [sample.value for sample in itl.samples if sample.name.endswith("_count")] == [2 * 49_999]
