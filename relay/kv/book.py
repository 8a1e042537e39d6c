"""Who holds which block of one pool: the owner's book. It moves no bytes.

    free -> leased -> running -> free          a lease that was filled and adopted
            leased -> quarantined -> free      a lease that was given up while its writer may still write
    free -> running -> free                    blocks computed here

The law of blocks, free + cached + leased + running + quarantined = total, holds after every call. Both the actor and the compute thread
call in; each call holds one short lock.
"""

import threading
from collections import deque
from collections.abc import Iterable
from enum import IntEnum

import msgspec


class BlockState(IntEnum):
    FREE = 0
    CACHED = 1
    LEASED = 2
    RUNNING = 3
    QUARANTINED = 4


class BlockCounts(msgspec.Struct, frozen=True, kw_only=True):
    """One pool's blocks by state, as `/debug/kv` shows them."""

    total: int
    free: int
    cached: int
    leased: int
    running: int
    quarantined: int

    def audit(self) -> str:
        """Empty if the law of blocks holds, else what is wrong."""
        parts = self.free + self.cached + self.leased + self.running + self.quarantined
        return "" if parts == self.total else f"{parts} blocks accounted for, {self.total} in the pool"


class BlockBook:
    """Allocation of `n_blocks` blocks. Least recently freed first, so that a stale writer's damage would be noticed late: tests poison."""

    def __init__(self, n_blocks: int) -> None:
        self._lock = threading.Lock()
        self._state = [BlockState.FREE] * n_blocks
        self._free = deque(range(n_blocks))
        self._reserved = 0

    def allocate(self, n: int) -> list[int] | None:
        """`n` blocks to compute in, or None if there are not so many. Reserved blocks are given."""
        with self._lock:
            return self._take(n, BlockState.RUNNING) if n <= len(self._free) else None

    def lease(self, n: int) -> list[int] | None:
        """`n` blocks for somebody else to write, or None; leaves what is reserved."""
        with self._lock:
            return self._take(n, BlockState.LEASED) if n + self._reserved <= len(self._free) else None

    def reserve(self, n: int) -> None:
        """Keep `n` blocks from being leased: preempted sequences wait for them."""
        with self._lock:
            self._reserved = n

    def adopt(self, blocks: Iterable[int]) -> None:
        """A lease was filled."""
        self._move(blocks, BlockState.LEASED, BlockState.RUNNING)

    def quarantine(self, blocks: Iterable[int]) -> None:
        """A lease was given up, and its writer has not said that it stopped."""
        self._move(blocks, BlockState.LEASED, BlockState.QUARANTINED)

    def free(self, blocks: Iterable[int]) -> None:
        """Nobody reads or writes these any more."""
        with self._lock:
            for block in blocks:
                state = self._state[block]
                if state is BlockState.FREE:
                    raise AssertionError(f"block {block} is free already")
                self._state[block] = BlockState.FREE
                self._free.append(block)

    def n_free(self) -> int:
        """Blocks that `lease` could give."""
        with self._lock:
            return max(0, len(self._free) - self._reserved)

    def counts(self) -> BlockCounts:
        """Counted anew from what each block says and from the free list, so that the two can disagree."""
        with self._lock:
            states = list(self._state)
            free = len(self._free)
        return BlockCounts(
            total=len(states),
            free=free,
            cached=states.count(BlockState.CACHED),
            leased=states.count(BlockState.LEASED),
            running=states.count(BlockState.RUNNING),
            quarantined=states.count(BlockState.QUARANTINED),
        )

    def _take(self, n: int, state: BlockState) -> list[int]:
        blocks = [self._free.popleft() for _ in range(n)]
        for block in blocks:
            self._state[block] = state
        return blocks

    def _move(self, blocks: Iterable[int], old: BlockState, new: BlockState) -> None:
        with self._lock:
            for block in blocks:
                if self._state[block] is not old:
                    raise AssertionError(f"block {block} is {self._state[block].name}, not {old.name}")
                self._state[block] = new
