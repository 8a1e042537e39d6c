"""Turns on a gateway's loop: what clients ask for is done in pieces of a few milliseconds, and a few of those in one pass of the loop.

In one pass trio runs everything that is ready, and what comes meanwhile waits for the next one: a thousand requests that arrive together,
or one answer of 40 MiB, would make a pass of seconds, in which no other stream gets a token and no heartbeat goes out.
"""

import trio

from relay.clock import now_ns

_AT_ONCE = 4
_PIECE_NS = 2_000_000


class Turns:
    """Of one loop. First come, first served; the connections' readers take one for each part that they read, and so bound what follows."""

    def __init__(self, at_once: int = _AT_ONCE) -> None:
        self._places = trio.Semaphore(at_once)

    async def next(self) -> None:
        """Return in a pass of the loop that has room for one more piece. A place is given on with the next pass, whatever becomes of the
        piece: it may wait for its client as long as it likes."""
        async with self._places:
            pass

    def pace(self) -> "Pace":
        return Pace(self)


class Pace:
    """Of work that may be long: `breathe` now and then, and it waits for its next turn when it has had a piece's time."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._until_ns = now_ns() + _PIECE_NS

    async def breathe(self) -> None:
        if now_ns() >= self._until_ns:
            await self._turns.next()
            self._until_ns = now_ns() + _PIECE_NS
