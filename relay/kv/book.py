"""Who holds which block of one pool, and what is still in it: the owner's book. It moves no bytes.

    free -> leased -> running -> free | cached     a lease that was filled and adopted
            leased -> quarantined -> free          a lease that was given up while its writer may still write
    free -> running -> free | cached               blocks computed here
    cached -> running                              found again by its prefix, shared by any number of sequences
    cached -> free                                 least recently used first, when there is no other

A full block may be published under its key. Then it can be matched while it runs and after, until its last reader has left and somebody
needs the memory. The law of blocks, free + cached + leased + running + quarantined = total, holds after every call. Both the actor and the
compute thread call in; each call holds one short lock.
"""

import threading
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from enum import IntEnum

import msgspec

from relay.kv.prefix import BlockKey


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


class Published(msgspec.Struct, frozen=True):
    """What a block holds: its key, and its tokens to compare on a hit."""

    key: BlockKey
    tokens: tuple[int, ...]


class CacheChanges(msgspec.Struct):
    """Keys that can be matched since the last time this was taken, and keys that cannot any more."""

    added: list[BlockKey]
    removed: list[BlockKey]


class BlockBook:
    """Allocation of `n_blocks` blocks; `caching` False publishes nothing."""

    def __init__(self, n_blocks: int, *, caching: bool = True) -> None:
        self._lock = threading.Lock()
        self._state = [BlockState.FREE] * n_blocks
        self._readers = [0] * n_blocks
        self._free = deque(range(n_blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._published: dict[int, Published] = {}
        self._by_key: dict[BlockKey, int] = {}
        self.caching = caching
        self._changes: dict[BlockKey, bool] = {}  # whether it can be matched now, of keys that came or went: the last word counts
        self._reserved = 0

    # --- taking

    def allocate(self, n: int) -> list[int] | None:
        """`n` blocks to compute in, or None if there are not so many. Reserved blocks are given."""
        with self._lock:
            return self._take(n, BlockState.RUNNING) if n <= len(self._free) + len(self._cached) else None

    def lease(self, n: int) -> list[int] | None:
        """`n` blocks for somebody else to write, or None; leaves what is reserved."""
        with self._lock:
            return self._take(n, BlockState.LEASED) if n + self._reserved <= len(self._free) + len(self._cached) else None

    def match(self, keys: Sequence[BlockKey], tokens: Sequence[int]) -> list[int]:
        """The longest run of published blocks for `keys`, from the first on, as one more reader of each. Tokens are compared."""
        blocks: list[int] = []
        with self._lock:
            for i, key in enumerate(keys):
                block = self._by_key.get(key)
                if block is None:
                    break
                held = self._published[block].tokens
                if held != tuple(tokens[i * len(held) : (i + 1) * len(held)]):
                    break
                if self._state[block] is BlockState.CACHED:
                    del self._cached[block]
                    self._state[block] = BlockState.RUNNING
                self._readers[block] += 1
                blocks.append(block)
        return blocks

    def reserve(self, n: int) -> None:
        """Keep `n` blocks from being leased: preempted sequences wait for them."""
        with self._lock:
            self._reserved = n

    # --- changing

    def adopt(self, blocks: Iterable[int]) -> None:
        """A lease was filled."""
        with self._lock:
            for block in blocks:
                self._expect(block, BlockState.LEASED)
                self._state[block], self._readers[block] = BlockState.RUNNING, 1

    def quarantine(self, blocks: Iterable[int]) -> None:
        """A lease was given up, and its writer has not said that it stopped."""
        with self._lock:
            for block in blocks:
                self._expect(block, BlockState.LEASED)
                self._state[block] = BlockState.QUARANTINED

    def publish(self, block: int, key: BlockKey, tokens: tuple[int, ...]) -> None:
        """A running block is full and computed. The first to publish a key keeps it."""
        if not self.caching:
            return
        with self._lock:
            self._expect(block, BlockState.RUNNING)
            if key not in self._by_key and block not in self._published:
                self._by_key[key] = block
                self._published[block] = Published(key, tokens)
                self._changes[key] = True

    def is_published(self, key: BlockKey) -> bool:
        """Whether a match would go on here (tokens not compared)."""
        return key in self._by_key

    def free(self, blocks: Sequence[int]) -> None:
        """The caller reads or writes these no more. Of a prefix the end goes first, so that its beginning stays longest."""
        with self._lock:
            for block in reversed(blocks):
                state = self._state[block]
                if state in (BlockState.FREE, BlockState.CACHED):
                    raise AssertionError(f"block {block} is {state.name} already")
                if state is BlockState.RUNNING:
                    self._readers[block] -= 1
                    if self._readers[block] > 0:
                        continue
                if block in self._published:
                    self._state[block] = BlockState.CACHED
                    self._cached[block] = None
                else:
                    self._state[block] = BlockState.FREE
                    self._free.append(block)

    # --- telling

    def n_free(self) -> int:
        """Blocks that `lease` could give."""
        with self._lock:
            return max(0, len(self._free) + len(self._cached) - self._reserved)

    def take_changes(self) -> CacheChanges:
        """What the router's index has to hear."""
        with self._lock:
            changes, self._changes = self._changes, {}
        return CacheChanges([key for key, here in changes.items() if here], [key for key, here in changes.items() if not here])

    def published_keys(self) -> list[BlockKey]:
        """All keys that can be matched, for a snapshot; what was still to be told is part of it."""
        with self._lock:
            self._changes = {}
            return list(self._by_key)

    def counts(self) -> BlockCounts:
        """Counted anew from what each block says and from the free list, so that the two can disagree."""
        with self._lock:
            states, free = list(self._state), len(self._free)
        return BlockCounts(
            total=len(states),
            free=free,
            cached=states.count(BlockState.CACHED),
            leased=states.count(BlockState.LEASED),
            running=states.count(BlockState.RUNNING),
            quarantined=states.count(BlockState.QUARANTINED),
        )

    # --- inside

    def _take(self, n: int, state: BlockState) -> list[int]:
        blocks = []
        for _ in range(n):
            block = self._free.popleft() if self._free else self._evict()
            self._state[block] = state
            self._readers[block] = 1 if state is BlockState.RUNNING else 0
            blocks.append(block)
        return blocks

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        key = self._published.pop(block).key
        del self._by_key[key]
        self._changes[key] = False
        return block

    def _expect(self, block: int, state: BlockState) -> None:
        if self._state[block] is not state:
            raise AssertionError(f"block {block} is {self._state[block].name}, not {state.name}")
