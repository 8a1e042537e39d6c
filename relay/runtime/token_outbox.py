"""Rows of tokens on their way to gateways: one frame a step and gateway, more where one would not hold them; without credit rows wait, and
merge with later ones.

In: rows by gateway, as steps give them. Out: `Tokens` frames, in order for each gateway. Part of a decode actor, and ends with it.
"""

import trio

from relay.errors import LaneFull
from relay.messages import Address, Tokens
from relay.runtime.node import Context
from relay.runtime.row_parts import Given, frames_of, with_trail

Rows = dict[Address, list[Given]]


class TokenOutbox:
    def __init__(self, context: Context, *, exact: bool) -> None:
        """exact: see `relay.messages.Tokens`."""
        self._context, self._exact = context, exact
        self._unsent: Rows = {}
        self._full: list[Address] = []  # gateways whose first rows in `_unsent` have nobody yet who sends them
        self._wake = trio.Event()

    async def run(self) -> None:
        """Rows that found no credit go as soon as there is some; one task per gateway, or two frames would overtake each other."""
        async with trio.open_nursery() as nursery:
            while True:
                await self._wake.wait()
                self._wake = trio.Event()
                while self._full:
                    nursery.start_soon(self._send_when_free, self._full.pop())

    def send(self, rows: Rows) -> None:
        for gateway, some in rows.items():
            waiting = self._unsent.get(gateway)
            if waiting is not None:
                waiting += some
                continue
            groups = list(frames_of(some))
            while groups:
                try:
                    self._context.offer(gateway, self._frame(groups[0]))
                except LaneFull:
                    self._unsent[gateway] = [given for group in groups for given in group]
                    self._full.append(gateway)
                    self._wake.set()
                    break
                del groups[0]

    def forget(self, gateway: Address) -> None:
        """It is dead."""
        self._unsent.pop(gateway, None)

    async def _send_when_free(self, gateway: Address) -> None:
        while rows := self._unsent.get(gateway):
            first, *others = frames_of(rows)
            self._unsent[gateway] = [given for group in others for given in group]
            await self._context.send(gateway, self._frame(first))
        self._unsent.pop(gateway, None)

    def _frame(self, rows: list[Given]) -> Tokens:
        trails, source = [trail for _, trail in rows], self._context.address
        if trails.count(trails[0]) == len(trails):
            return Tokens(source=source, rows=tuple(row for row, _ in rows), trail=trails[0], exact=self._exact)
        merged = tuple(with_trail(row, row.trail + trail) for row, trail in rows)
        return Tokens(source=source, rows=merged, exact=self._exact)
