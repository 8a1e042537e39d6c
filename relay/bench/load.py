"""Sends planned requests when they are due and keeps what came of them. Knows no network: `prepare` makes bytes, `ask` sends them.

A closed loop has `concurrency` streams, each asking again when it is answered. An open loop sends at the planned times whatever the
server does, and bodies are made ahead of them. A request that is late counts from when it was due.
"""

from collections.abc import Awaitable, Callable, Iterable, Iterator

import trio

from relay.bench.record import Record
from relay.bench.schedule import Planned

Prepare = Callable[[Planned], bytes]
Ask = Callable[[bytes, Planned, float, float], Awaitable[Record]]


class Load:
    """`records` are of ended requests; cancelling `run` leaves those in flight out, as `in_flight` says."""

    def __init__(self, prepare: Prepare, ask: Ask) -> None:
        self._prepare, self._ask = prepare, ask
        self.records: list[Record] = []
        self.in_flight = self.failed = 0
        self.epoch = trio.current_time()

    async def closed(self, plan: Iterable[Planned], concurrency: int) -> None:
        """Until the plan is done."""
        self.epoch = trio.current_time()
        left = iter(plan)
        async with trio.open_nursery() as nursery:
            for _ in range(concurrency):
                nursery.start_soon(self._stream, left)
                await trio.lowlevel.checkpoint()  # what the first streams get is read before the last one starts

    async def open(self, plan: Iterable[Planned]) -> None:
        """Until all that was planned is answered."""
        self.epoch = trio.current_time()
        async with trio.open_nursery() as nursery:
            for planned in plan:
                body = self._prepare(planned)
                due = self.epoch + planned.at_s
                await trio.sleep_until(due)
                nursery.start_soon(self._one, body, planned, due)
                for _ in range(2):  # the first may come before its turn: it is sent before the next body is made
                    await trio.lowlevel.checkpoint()

    async def _stream(self, left: Iterator[Planned]) -> None:
        for planned in left:
            body = self._prepare(planned)
            await self._one(body, planned, trio.current_time())

    async def _one(self, body: bytes, planned: Planned, start: float) -> None:
        self.in_flight += 1
        record = await self._ask(body, planned, start, self.epoch)
        self.in_flight -= 1
        self.failed += not record.ok
        self.records.append(record)
