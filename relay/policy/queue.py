"""Attempts that wait for a place: by priority, then by turns of the requests that they are of. Pure.

A request of many sequences must not keep one of a single sequence waiting until they all have run, and many requests of one sequence must
not keep it from ever having a turn. So turns are those of weighted fair queueing: the line's clock goes on by one while each request that
waits gets one place, an attempt's turn is when it came by that clock, and one after the turn of its request's attempt before.
"""

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from relay.messages import Admit, Key
from relay.policy.weight import admit_bytes

_Rank = tuple[int, bool, float, int, Key]  # priority, whether it waits for the first time, turn, number, who


@dataclass(frozen=True, slots=True)
class Queued:
    """`declined`: it had a place already and lost it, so it goes before its equals."""

    admit: Admit
    received_ns: int
    declined: bool = False

    @property
    def key(self) -> Key:
        return self.admit.request_id, self.admit.attempt


@dataclass(slots=True)
class _Request:
    """One whose attempts wait."""

    n_waiting: int
    turn: float  # of the last that came


def request_of(request_id: str) -> str:
    """The client's request that this sequence is of: they differ in what stands behind the stroke."""
    return request_id.partition("/")[0]


class WaitingLine:
    """A heap with lazy removal. A lower `priority` number goes first; a later attempt before first ones, since it has waited once."""

    def __init__(self) -> None:
        self._heap: list[_Rank] = []
        self._aside: dict[Key, _Rank] = {}
        self._waiting: dict[Key, tuple[int, Queued]] = {}
        self._requests: dict[str, _Request] = {}
        self._numbers = itertools.count()
        self.n_bytes = 0
        self._clock = 0.0

    def add(self, queued: Queued) -> None:
        admit, number = queued.admit, next(self._numbers)
        self.remove(queued.key)
        request = self._requests.get(request_of(admit.request_id))
        if request is None:
            request = self._requests[request_of(admit.request_id)] = _Request(0, self._clock - 1)
        request.turn, request.n_waiting = max(self._clock, request.turn + 1), request.n_waiting + 1
        self._waiting[queued.key] = number, queued
        self.n_bytes += admit_bytes(admit)
        rank = admit.priority, admit.attempt == 1 and not queued.declined, request.turn, number, queued.key
        heapq.heappush(self._heap, rank)

    def first(self) -> Queued | None:
        """The one whose turn it is; it stays."""
        while self._heap:
            _, _, _, number, key = self._heap[0]
            found = self._waiting.get(key)
            if found is not None and found[0] == number:
                return found[1]
            heapq.heappop(self._heap)
        return None

    def place(self, key: Key) -> None:
        """It has got its place, and the others are nearer to theirs."""
        self._clock += 1 / max(1, len(self._requests))
        self.remove(key)

    def set_aside(self, key: Key) -> None:
        """Pass over the first, `key`, until `bring_back`: what it waits for is not what the others wait for."""
        assert self._heap[0][-1] == key
        self._aside[key] = heapq.heappop(self._heap)

    def bring_back(self) -> None:
        """All that were set aside have the turns again that they had."""
        for rank in self._aside.values():
            heapq.heappush(self._heap, rank)
        self._aside.clear()

    def remove(self, key: Key) -> Queued | None:
        found = self._waiting.pop(key, None)
        if found is None:
            return None
        self.n_bytes -= admit_bytes(found[1].admit)
        self._aside.pop(key, None)
        name = request_of(key[0])
        request = self._requests[name]
        request.n_waiting -= 1
        if not request.n_waiting:
            del self._requests[name]
        return found[1]

    @property
    def n_requests(self) -> int:
        """Those of clients that wait, each with one sequence or with many."""
        return len(self._requests)

    def __contains__(self, key: Key) -> bool:
        return key in self._waiting

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[tuple[Key, Queued]]:
        """In no particular order; the line may change meanwhile."""
        return iter([(key, queued) for key, (_, queued) in self._waiting.items()])
