"""The choices of one request on their way to places: some at a time, so that a request of thousands fills nobody's mailbox."""

from collections.abc import Awaitable, Callable, Sequence

from relay.actors.gateway import Bell, Flight

_MOST_UNPLACED = 64

Start = Callable[[Flight, bool], Awaitable[None]]


async def feed(flights: Sequence[Flight], start: Start, most: int = _MOST_UNPLACED) -> None:
    """Start them in order, each with whether the request has been taken before; no more than `most` wait for a place at once."""
    door = Bell()
    waiting: list[Flight] = []
    for number, flight in enumerate(flights):
        flight.door = door
        await start(flight, number >= most)
        waiting.append(flight)
        while len(waiting) >= most:
            waiting = [each for each in waiting if each.waits]
            if len(waiting) >= most:
                await door.wait()
