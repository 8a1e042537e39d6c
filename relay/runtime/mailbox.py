"""A mailbox and the lanes into it.

A mailbox is bounded by its senders, not by itself: each sending worker has one lane per destination actor with `window` credits, taken on
send and given back when the actor *takes* the message. So delivery never waits, a link's reader never blocks, and a slow actor stops only
those who write to it. What rides outside the lanes costs no credit; its number is bounded by the protocol, as is that of the messages
that wait in a lane for credits: they go before whatever comes later.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import trio

from relay.errors import LaneFull
from relay.messages import Address, Message

Life = tuple[str, int]  # a worker in one epoch
Sent = tuple[str, Message]  # with the local actor that sends it


class Lane:
    """Credits of one sending worker towards one actor."""

    def __init__(self, to: Address, window: int) -> None:
        self._to, self._window = to, window
        self.free = window
        self._closed = False
        self._late: deque[Sent] = deque()
        self._waiting = trio.lowlevel.ParkingLot()

    @property
    def n_late(self) -> int:
        return len(self._late)

    def take(self) -> None:
        """Use one credit. Raises LaneFull."""
        if self.free == 0:
            raise LaneFull(f"{self._to} has not taken the last {self._window} messages of this worker: merge, refuse, or wait with `send`")
        self.free -= 1

    async def wait(self) -> None:
        """Return once a credit is free, or the lane leads to a dead address. Whoever takes before its next await gets the credit."""
        await trio.lowlevel.checkpoint()
        while self.free == 0 and not self._closed:
            await self._waiting.park()

    def put_off(self, sent: Sent) -> None:
        """There is no credit: it goes when one comes."""
        self._late.append(sent)

    def give(self, n: int) -> list[Sent]:
        """Credits come back. Returns what goes for them at once."""
        late = [self._late.popleft() for _ in range(min(n, len(self._late)))]
        self.free += n - len(late)
        if self.free:
            self._waiting.unpark(count=n - len(late))
        return late

    def close(self) -> None:
        """The address is dead: let everyone go who waits for room."""
        self._closed = True
        self._late.clear()
        self._waiting.unpark_all()


@dataclass(frozen=True, slots=True)
class AtOnce:
    """Messages of this kind may be given to `take` as they come, where `is_free` says that the actor has none in hand."""

    kind: type
    take: Callable[[Any], None]
    is_free: Callable[[], bool] = lambda: True


class Mailbox:
    """Messages for one actor, in order per sender. For one reader; iterating tells `taken` of each message, which returns its credit."""

    def __init__(self, taken: Callable[[Life | None, Message], None]) -> None:
        self._messages: deque[tuple[Life | None, Message]] = deque()
        self._taken = taken
        self._closed = False
        self._reader = trio.lowlevel.ParkingLot()
        self._at_once: AtOnce | None = None
        self._failure: Exception | None = None

    def put(self, origin: Life | None, message: Message, *, at_once: bool = False) -> None:
        """Never waits. `origin` is the sending worker whose lane paid, or None where no credit was used.

        at_once: it may be taken here and now, if nothing lies before it and its actor has said how (`take_at_once`). What that raises is
        raised to the actor as it iterates, and nothing more is taken.
        """
        if self._closed or self._failure is not None:
            return
        now = self._at_once
        if at_once and now is not None and not self._messages and isinstance(message, now.kind) and now.is_free():
            try:
                self._taken(origin, message)
                now.take(message)
            except Exception as error:  # the actor's own failure, and no link's
                self._failure = error
                self._reader.unpark()
            return
        self._messages.append((origin, message))
        self._reader.unpark()

    def take_at_once(self, how: AtOnce | None) -> None:
        """For an actor that handles each message without waiting: then no turn of the loop lies between arrival and handling."""
        self._at_once = how

    def close(self) -> None:
        """End the actor's iteration after what is already here; later mail is dropped."""
        self._closed = True
        self._reader.unpark_all()

    def __aiter__(self) -> "Mailbox":
        return self

    async def __anext__(self) -> Message:
        await trio.lowlevel.checkpoint()
        while self._failure is not None or not self._messages:
            if self._failure is not None:
                raise self._failure
            if self._closed:
                raise StopAsyncIteration
            await self._reader.park()
        origin, message = self._messages.popleft()
        self._taken(origin, message)
        return message

    def __len__(self) -> int:
        return len(self._messages)
