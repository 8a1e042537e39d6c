"""How the choices of one request are started."""

import trio
import trio.testing

from relay.actors.gateway import Bell, Flight
from relay.http.feed import feed
from relay.ledger.ledger import Ledger
from relay.messages import Address, Sampling, Stopping


def test_some_wait_for_a_place_at_a_time_and_the_others_follow() -> None:
    """Whether it gets a place, has its tokens first, or ends in an error."""
    flights = [Flight(f"r/{i}", (1,), Sampling(), Stopping(max_tokens=1), Ledger(0), Bell()) for i in range(12)]
    started: list[tuple[str, bool]] = []

    async def start(flight: Flight, later: bool) -> None:
        started.append((flight.request_id, later))

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(feed, flights, start, 4)
            await trio.testing.wait_all_tasks_blocked()
            assert started == [(f"r/{i}", False) for i in range(4)]
            flights[0].decode = Address("decode/0", 1)
            flights[0].ring()
            flights[3].ids.append(5)
            flights[3].ring()
            await trio.testing.wait_all_tasks_blocked()
            assert started[4:] == [("r/4", True), ("r/5", True)]
            for flight in flights:
                flight.finish = "length"
                flight.ring()

    trio.run(main)
    assert [name for name, _ in started] == [flight.request_id for flight in flights]
