"""The ledger's law of levers: where nothing else changes, what a span says less of is what the wall gets shorter by."""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from relay.config import RouterConfig, RuntimeConfig
from relay.ledger.ledger import Ledger
from relay.messages import Sampling, Stopping
from relay.simulation import scheduler
from relay.simulation.oracle import answer
from relay.simulation.scenario import N_LAYERS, VOCAB_SIZE, Pace, Scenario, Visit, Wish, WorkerPlan
from relay.simulation.world import World

PROMPT = tuple(range(20, 33))
DISAGGREGATED = (WorkerPlan("prefill-0", {"prefill/0": False}, 40), WorkerPlan("decode-0", {"decode/0": False}, 40))
AGGREGATED = (WorkerPlan("both-0", {"prefill/0": False, "decode/0": False}, 40),)


def each_takes(seconds: float, draw: random.Random) -> float:
    return seconds


def scenario(workers: tuple[WorkerPlan, ...], draft_rows: int, n_clients: int) -> Scenario:
    """Quiet: clients that come together, and nothing that fails."""
    stopping = Stopping(max_tokens=14)
    wish = Wish(PROMPT, Sampling(temperature=0.0), stopping, answer(PROMPT, Sampling(temperature=0.0), stopping, VOCAB_SIZE, N_LAYERS))
    visit = Visit(
        arrives_s=0.2,
        gateway=0,
        wishes=(wish,),
        salt="",
        priority=0,
        patience_s=float("inf"),
        reads_s=0.0,
        deadline_s=0.0,
        poison=None,
        resumes=False,
        returns_s=0.0,
        doubles=False,
    )
    hop = partial(each_takes, 0.001)
    return Scenario(
        workers=(WorkerPlan("gateway-0", {"gateway/0": False}), WorkerPlan("router-0", {"router/0": False}), *workers),
        visits=(visit,) * n_clients,
        pace=Pace(hop, 0.0, 0.0, 0.0, 0.0, 0.0, tile_ms=8.0, silent_s=9.0, link_deadline_s=9.0, grace_s=0.05, drain_s=0.05, yields=0.0),
        router=RouterConfig(),
        runtime=RuntimeConfig(spares=0),
        window=4096,
        max_attempts=3,
        max_running=64,
        max_chunk_tokens=512,
        tile_rows=16,
        caching=True,
        spread_s=0.3,
        draft_rows=draft_rows,
        beside=True,
        verify_bytes_per_ms=1 << 20,
        stops_s=0.0,
    )


def ledgers(played: Scenario) -> list[Ledger]:
    """Of all clients, in their order."""
    world: World | None = None

    async def main() -> None:
        nonlocal world
        world = World(3, scenario=played)
        await world.run()

    scheduler.run(main, 3)
    assert world is not None
    assert [client.outcome for client in world.clients] == ["answered"] * len(played.visits)
    return [connection.ledger for connection in world.connections()]


def faster_hops(played: Scenario) -> Scenario:
    return replace(played, pace=replace(played.pace, delay=partial(each_takes, 0.0)))


def faster_steps(played: Scenario) -> Scenario:
    """And what their threads take between them."""
    return replace(played, pace=replace(played.pace, tile_ms=4.0))


def faster_reading(played: Scenario) -> Scenario:
    return replace(played, visits=tuple(replace(visit, reads_s=0.0) for visit in played.visits))


def slow_reading(played: Scenario) -> Scenario:
    return replace(played, visits=tuple(replace(visit, reads_s=0.002) for visit in played.visits))


LEVERS: list[tuple[str, Callable[[Scenario], Scenario], tuple[str, ...]]] = [
    ("hops", faster_hops, ("hop",)),
    ("steps", faster_steps, ("prefill.host", "prefill.excess", "decode.host", "decode.excess")),
    ("reading", faster_reading, ("out.write_blocked",)),
]


@pytest.mark.parametrize("workers", [DISAGGREGATED, AGGREGATED], ids=["disaggregated", "aggregated"])
@pytest.mark.parametrize("draft_rows", [0, 8])
@pytest.mark.parametrize(("name", "pull", "spans"), LEVERS, ids=[lever[0] for lever in LEVERS])
def test_the_wall_gets_shorter_by_what_the_span_does(
    name: str, pull: Callable[[Scenario], Scenario], spans: tuple[str, ...], draft_rows: int, workers: tuple[WorkerPlan, ...]
) -> None:
    """And no other span changes."""
    played = slow_reading(scenario(workers, draft_rows, 1))
    (before,), (after,) = ledgers(played), ledgers(pull(played))
    said = sum(before.spans().get(span, 0) - after.spans().get(span, 0) for span in spans)
    assert said > 0
    assert before.wall_ns - after.wall_ns == said
    others = [{span: ns for span, ns in ledger.spans().items() if span not in spans} for ledger in (before, after)]
    assert others[0] == others[1]


def test_a_hop_that_nobody_waits_for_is_not_claimed() -> None:
    """There are 14 tokens, and one journey of each message on the way to the first and of the last token: five hops, not eighteen."""
    (ledger,) = ledgers(scenario(DISAGGREGATED, 0, 1))
    assert ledger.spans()["hop"] == 5_000_000
