"""The decode rows of the next step, made while this one is computed: all of them but the tokens that are being drawn.

In: sequences that each get one token from the step under way. Out: positions, block tables and draws as the step after it has them, if by
then nothing else has happened to the sequence: `find` says so. What was made for one that finished, or went, is not looked at.
"""

from collections.abc import Sequence as Several

import numpy as np

from relay.engine.keyed_random import uniform
from relay.engine.runner import Batch, Draw
from relay.engine.sequence import Sequence, SequenceId


def next_draw(sequence: Sequence, n_more: int = 0) -> Draw:
    """How the token behind those that it has, and `n_more` that are yet to come, is drawn."""
    sampling = sequence.sampling
    random = uniform(sampling.seed, sampling.choice, len(sequence.tokens) + n_more) if sampling.temperature > 0 else 0.0
    return Draw(sampling, random, sequence.tokens, sequence.n_prompt, sequence.suppressed(n_more))


class RowsAhead:
    """draws: one for each. whole: a step of the next token of each."""

    def __init__(self, sequences: Several[Sequence]) -> None:
        """Of at least one. Each has its tokens but the one that is being drawn, and blocks for it."""
        self._sequences = list(sequences)
        self._row: dict[SequenceId, int] = {sequence.id: row for row, sequence in enumerate(sequences)}
        self._blocks = [sequence.blocks for sequence in sequences]
        self._n_blocks = [len(blocks) for blocks in self._blocks]
        self._n_computed = [len(sequence.tokens) for sequence in sequences]
        self._positions = np.asarray(self._n_computed, dtype=np.int32)
        self._table = np.full((len(sequences), max(self._n_blocks)), -1, dtype=np.int32)
        for row, blocks in enumerate(self._blocks):
            self._table[row, : len(blocks)] = blocks
        self.draws = [next_draw(sequence, 1) for sequence in sequences]
        numbers = np.arange(len(sequences), dtype=np.int32)
        self.whole = Batch(np.zeros_like(numbers), self._positions, numbers, self._table, numbers, tuple(self.draws))

    def find(self, sequence: Sequence) -> int | None:
        """Its row, if it has gained its token and is otherwise as it was."""
        row = self._row.get(sequence.id)
        if row is None or sequence.blocks is not self._blocks[row] or len(sequence.blocks) != self._n_blocks[row]:
            return None  # it was preempted, or has grown once more
        n_computed = self._n_computed[row]
        return row if sequence.n_computed == n_computed and len(sequence.tokens) == n_computed + 1 else None

    def is_of(self, sequences: Several[Sequence]) -> bool:
        """Whether these are all, in order: then `whole` is their next step, but for its tokens."""
        return len(sequences) == len(self._sequences) and all(a is b for a, b in zip(sequences, self._sequences, strict=True))

    def batch(self, sequences: Several[Sequence]) -> Batch | None:
        """A step of the next token of each of these and nothing else; None if `find` does not find one of them."""
        found = [self.find(sequence) for sequence in sequences]
        rows = np.asarray([row for row in found if row is not None], dtype=np.intp)
        if len(rows) < len(found):
            return None
        numbers = np.arange(len(rows), dtype=np.int32)
        return Batch(
            tokens=np.asarray([sequence.tokens[-1] for sequence in sequences], dtype=np.int32),
            positions=self._positions[rows],
            sequence=numbers,
            block_table=self._table[rows, : max(self._n_blocks[row] for row in rows)],
            logit_rows=numbers,
            draws=tuple(self.draws[row] for row in rows),
        )
