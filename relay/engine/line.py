"""Sequences that wait to be computed, in the order in which they are, and how they come by their blocks.

In: sequences, by `add`. Out: by `ready`, those of which a step may compute something now. Order is by preemption (those first), priority,
whether clients have tokens of it already, and age.

A sequence that has no blocks yet gets them when its turn comes: what is cached of its prefix, and fresh ones for the rest. One whose next
block another is computing right now waits for that, and shares it. What a preempted sequence needs stays reserved, so that new leases
cannot starve it.
"""

from collections.abc import Iterator

from relay.engine.sequence import Sequence, SequenceId
from relay.kv.book import BlockBook
from relay.kv.pool import KVPool
from relay.kv.prefix import BlockKey


class Line:
    """Owns nobody's blocks: a sequence takes its own with it."""

    def __init__(self, book: BlockBook, memory: KVPool) -> None:
        self._book, self._memory, self._block_tokens = book, memory, memory.layout.block_tokens
        self._waiting: dict[SequenceId, Sequence] = {}  # in order
        self._coming: dict[BlockKey, SequenceId] = {}  # blocks that one of them is about to compute

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, sequence_id: object) -> bool:
        return sequence_id in self._waiting

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._waiting.values())

    @property
    def is_clear(self) -> bool:
        """Whether nothing of a sequence is left here."""
        return not (self._waiting or self._coming)

    def goes_on_beside(self, one: Sequence) -> bool:
        """Whether clients have tokens of another one already, and wait for the next."""
        return any(sequence.n_generated > 0 and sequence is not one for sequence in self._waiting.values())

    def add(self, sequence: Sequence) -> None:
        self._waiting[sequence.id] = sequence
        if any(_rank(other) > _rank(sequence) for other in self._waiting.values()):
            self._waiting = dict(sorted(self._waiting.items(), key=lambda item: _rank(item[1])))

    def remove(self, sequence_id: SequenceId) -> Sequence | None:
        """Take it out, if it is here; nobody waits for its blocks any more."""
        sequence = self._waiting.pop(sequence_id, None)
        if sequence is not None:
            self._withdraw(sequence)
        return sequence

    def reserve(self) -> None:
        """Keep free what preempted sequences need."""
        self._book.reserve(
            sum(
                self._memory.layout.blocks_for(len(sequence.tokens) + 1)
                for sequence in self._waiting.values()
                if sequence.preempted and not sequence.blocks
            )
        )

    def ready(self, room: int) -> list[Sequence]:
        """What waits and has, or now gets, its blocks, in order, until it is `room` tokens long or more."""
        ready: list[Sequence] = []
        full = False
        for sequence in self._waiting.values():
            if room <= 0:
                break  # who would get no token needs no blocks yet
            if full and not sequence.blocks:
                continue  # but one that has its blocks goes on: it may be what the others wait for
            if not self._find_blocks(sequence):
                sequence.lacked_blocks = full = True
                continue
            if self._catch_up(sequence):
                ready.append(sequence)
                room -= len(sequence.tokens) - sequence.n_computed
        return ready

    def lone(self) -> Sequence | None:
        """The first that must share no step with others and can be computed now."""
        for sequence in self._waiting.values():
            if sequence.lone and self._find_blocks(sequence) and self._catch_up(sequence):
                return sequence
        return None

    def announce(self, sequence: Sequence) -> None:
        """From now on it is known which blocks this one will compute; without a cache they would be of no use to others."""
        if not self._book.caching:
            return
        n_full = len(sequence.tokens) // self._block_tokens
        for key in sequence.keys_until(n_full, self._block_tokens)[sequence.n_computed // self._block_tokens :]:
            self._coming.setdefault(key, sequence.id)

    def publish(self, sequence: Sequence) -> None:
        """Its full blocks can be found by others now."""
        size = self._block_tokens
        if sequence.borrowed:
            return
        while (sequence.n_published + 1) * size <= sequence.n_computed:
            n = sequence.n_published
            key = sequence.keys_until(n + 1, size)[n]
            self._book.publish(sequence.blocks[n], key, tuple(sequence.tokens[n * size : (n + 1) * size]))
            if self._coming.get(key) == sequence.id:
                del self._coming[key]
            sequence.n_published += 1

    def _withdraw(self, sequence: Sequence) -> None:
        """It will not compute what it has announced and not published."""
        for key in sequence.keys[sequence.n_published :]:
            if self._coming.get(key) == sequence.id:
                del self._coming[key]

    def _find_blocks(self, sequence: Sequence) -> bool:
        """False if it must wait for memory, and all behind it with it."""
        if sequence.blocks or self._is_coming(sequence, 0):
            return True
        n_reusable = 0 if sequence.prompt_logprobs >= 0 else (len(sequence.tokens) - 1) // self._block_tokens
        shared = self._book.match(sequence.keys_until(n_reusable, self._block_tokens), sequence.tokens)
        if len(shared) < n_reusable and self._is_coming(sequence, len(shared)):
            self._book.free(shared)
            return True
        more = self._book.allocate(self._memory.layout.blocks_for(len(sequence.tokens) + sequence.preempted) - len(shared))
        if more is None:
            self._book.free(shared)
            return False
        sequence.blocks = shared + more
        sequence.n_computed = len(shared) * self._block_tokens
        sequence.n_published = len(shared)
        if not sequence.preempted:
            sequence.n_cached = sequence.n_computed
        self.announce(sequence)
        self.reserve()
        return True

    def _catch_up(self, sequence: Sequence) -> bool:
        """Whether to compute it now. Not if another is about to compute its next block; and what has been computed meanwhile is taken."""
        if not sequence.blocks:
            return False
        size = self._block_tokens
        while sequence.borrowed and sequence.n_computed % size == 0 and sequence.n_computed + size < len(sequence.tokens):
            n = sequence.n_computed // size
            if sequence.prompt_logprobs >= 0 or not self._book.is_published(sequence.keys_until(n + 1, size)[n]):
                break
            shared = self._book.match(sequence.keys[: n + 1], sequence.tokens)
            if len(shared) == n + 1:
                self._memory.copy_block(shared[n], sequence.blocks[n])
                sequence.n_computed += size
                sequence.n_cached += size
            self._book.free(shared)
            if len(shared) != n + 1:
                break
        return not self._is_coming(sequence, sequence.n_computed // size)

    def _is_coming(self, sequence: Sequence, n: int) -> bool:
        """Whether a sequence before this one is about to compute its block `n`. (One behind it might be waiting for this one.)"""
        if sequence.prompt_logprobs >= 0 or (n + 1) * self._block_tokens >= len(sequence.tokens):
            return False
        owner = self._waiting.get(self._coming.get(sequence.keys_until(n + 1, self._block_tokens)[n], 0))
        return owner is not None and _rank(owner) < _rank(sequence)


def _rank(sequence: Sequence) -> tuple[bool, int, bool, int, SequenceId]:
    """Its place in the line. Of those that another worker's death displaced, whose clients see a gap, the shortest first."""
    recovers = sequence.n_generated > 0 and not sequence.preempted
    return not sequence.preempted, sequence.priority, not recovers, len(sequence.tokens) if recovers else 0, sequence.id
