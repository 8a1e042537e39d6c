"""Attempts that wait for a place: by priority, then in the order in which their requests came. Pure."""

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from relay.messages import Admit, Key
from relay.policy.weight import admit_bytes


@dataclass(frozen=True, slots=True)
class Queued:
    """`declined`: it had a place already and lost it, so it goes before its equals."""

    admit: Admit
    received_ns: int
    declined: bool = False


class WaitingLine:
    """A heap with lazy removal. A lower `priority` number goes first; a later attempt before first ones, since it has waited once."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, bool, int, Key]] = []
        self._waiting: dict[Key, tuple[int, Queued]] = {}
        self._numbers = itertools.count()
        self.n_bytes = 0

    def add(self, queued: Queued) -> None:
        admit, number = queued.admit, next(self._numbers)
        key = admit.request_id, admit.attempt
        self.remove(key)
        self._waiting[key] = number, queued
        self.n_bytes += admit_bytes(admit)
        heapq.heappush(self._heap, (admit.priority, admit.attempt == 1 and not queued.declined, number, key))

    def first(self) -> Queued | None:
        """The one whose turn it is; it stays."""
        while self._heap:
            _, _, number, key = self._heap[0]
            found = self._waiting.get(key)
            if found is not None and found[0] == number:
                return found[1]
            heapq.heappop(self._heap)
        return None

    def remove(self, key: Key) -> Queued | None:
        found = self._waiting.pop(key, None)
        if found is None:
            return None
        self.n_bytes -= admit_bytes(found[1].admit)
        return found[1]

    def __contains__(self, key: Key) -> bool:
        return key in self._waiting

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[tuple[Key, Queued]]:
        """In no particular order; the line may change meanwhile."""
        return iter([(key, queued) for key, (_, queued) in self._waiting.items()])
