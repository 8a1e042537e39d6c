"""Virtual time's to-do list, and links between two lives that delay: in order within a link, in any order between links.

A cut delays and loses nothing. A sender's death loses what had not left it: the end of what flies, from a drawn place on.
"""

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import trio

from relay.errors import FrameTooLarge
from relay.messages import Address, Message

if TYPE_CHECKING:
    from relay.simulation.life import Life

Delay = Callable[[random.Random], float]


class Agenda:
    """Calls at their times; at equal times in the order in which they were asked for. Between two calls others may run."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._earlier = trio.Event()

    def at(self, when: float, call: Callable[[], None]) -> None:
        if not self._heap or when < self._heap[0][0]:
            self._earlier.set()
        heapq.heappush(self._heap, (when, next(self._numbers), call))

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        self.at(trio.current_time() + delay_s, call)

    async def run(self) -> None:
        while True:
            now = trio.current_time()
            while self._heap and self._heap[0][0] <= now:
                heapq.heappop(self._heap)[2]()
                if self._draw.random() < 0.7:
                    await trio.lowlevel.checkpoint()
            self._earlier = trio.Event()
            with trio.move_on_at(self._heap[0][0] if self._heap else float("inf")):
                await self._earlier.wait()


class Link:
    """One direction between two lives; the sending node's outlet."""

    def __init__(self, agenda: Agenda, draw: random.Random, delay: Delay, source: "Life", target: "Life") -> None:
        self._agenda, self._draw, self._delay = agenda, draw, delay
        self._source, self._target = source, target
        self._flying: deque[Callable[[], None]] = deque()
        self.last = 0.0  # when the last of them arrives
        self.cut_until = 0.0

    def deliver(self, to: Address, body: Message) -> None:
        """Raises FrameTooLarge for what this seed says that no frame holds."""
        if self._source.is_too_large(body):
            raise FrameTooLarge(f"{type(body).__name__} for {to}, as this seed has it")
        self._send(lambda: self._target.node.delivered(self._source.key, to, body, at_once=True))

    def credit(self, to: Address, n: int) -> None:
        self._send(lambda: self._target.node.credited(to, n))

    def sender_died(self) -> None:
        """What was not yet written is lost; of a cut link everything."""
        now = trio.current_time()
        keep = 0 if now < self.cut_until else self._draw.choice((0, self._draw.randint(0, len(self._flying)), len(self._flying)))
        while len(self._flying) > keep:
            self._flying.pop()

    def is_empty(self) -> bool:
        return not self._flying

    def _send(self, arrive: Callable[[], None]) -> None:
        if self._source.dead or self._target.dead:
            return
        self._flying.append(arrive)
        self.last = max(self.last, trio.current_time() + self._delay(self._draw), self.cut_until)
        self._agenda.at(self.last, self._arrive)

    def _arrive(self) -> None:
        if trio.current_time() < self.cut_until:
            self.last = max(self.last, self.cut_until)
            self._agenda.at(self.cut_until, self._arrive)
        elif self._flying:
            self._target.receive(self._source, self._flying.popleft())
