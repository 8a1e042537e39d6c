"""Which graphs there are: one for each number of sequences and each length of context, up to some powers of two and four.

A step without chunks runs in the smallest that holds it. Its bits are those of any other, since no kernel's result depends on its grid.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:  # which imports torch, and the root plans with this
    from relay.kernels.device_runtime import Graph

_FIRST_CONTEXT: Final = 2048
_CONTEXT_GROWTH: Final = 4


class Bucket(NamedTuple):
    """n_rows sequences, up to `context` keys each."""

    n_rows: int
    context: int


def batch_sizes(max_running: int) -> tuple[int, ...]:
    """1, 2, 4, ... and the largest."""
    powers = [1 << i for i in range(max_running.bit_length()) if 1 << i < max_running]
    return (*powers, max_running)


def contexts(max_context: int) -> tuple[int, ...]:
    found = []
    context = _FIRST_CONTEXT
    while context < max_context:
        found.append(context)
        context *= _CONTEXT_GROWTH
    return (*found, max_context)


class DecodeGraphs:
    """Captured once, each counted when it is replayed."""

    def __init__(self, max_running: int, max_context: int) -> None:
        self._sizes, self._contexts = batch_sizes(max_running), contexts(max_context)
        self._graphs: dict[Bucket, Graph] = {}
        self.n_replays: dict[Bucket, int] = {}
        self.enabled = True

    def buckets(self) -> list[Bucket]:
        """The largest first: what it needs serves the others."""
        return [Bucket(n, context) for n in reversed(self._sizes) for context in reversed(self._contexts)]

    def bucket_for(self, n_rows: int, context: int) -> Bucket | None:
        size = next((size for size in self._sizes if size >= n_rows), None)
        length = next((length for length in self._contexts if length >= context), None)
        return None if size is None or length is None else Bucket(size, length)

    def capture_all(self, capture: "Callable[[Bucket], Graph]") -> None:
        for bucket in self.buckets():
            self._graphs[bucket] = capture(bucket)
            self.n_replays[bucket] = 0

    def replay(self, bucket: Bucket) -> bool:
        """Whether there is such a graph."""
        graph = self._graphs.get(bucket)
        if graph is None or not self.enabled:
            return False
        graph.replay()
        self.n_replays[bucket] += 1
        return True
