"""What a step reads on the device, at addresses that never change, and how a batch gets there.

Sequences with a single row (those that decode, at most `max_running`) come first, then chunks, each kind in the batch's order. So
`paged_decode` takes the first rows and `paged_prefill` the rest, and a batch without chunks is what a graph was captured for: padded to
its bucket by rows that belong to no sequence and see no keys.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from relay.engine.cuda.step_limits import StepLimits
from relay.engine.runner import Batch
from relay.kernels.device_runtime import Runtime
from relay.kv.layout import KVLayout

_TOKENS, _POSITIONS, _SEQUENCE, _LENGTHS, _CHUNK_LENGTHS, _STARTS, _LOGIT_ROWS = range(7)
_LINES: Final = 7
_UNIT: Final = 4  # int32 numbers to 16 bytes

Int32s = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Shape:
    """Of one step: rows, of which the first `n_single` are sequences of one row; (rows, keys) of each chunk; keys at most of a single."""

    n_rows: int
    n_single: int
    chunks: tuple[tuple[int, int], ...]
    context: int
    in_order: bool  # every row is a logit row


class StepInputs:
    """For steps within `limits`. Tensors are int32, on the device."""

    def __init__(self, limits: StepLimits, layout: KVLayout, vocab_size: int, runtime: Runtime) -> None:
        self._n_blocks, self._vocab_size, self._block_tokens = layout.n_blocks, vocab_size, layout.block_tokens
        self._limits = limits
        max_rows, max_blocks = limits.max_rows, limits.max_blocks(layout.block_tokens)
        line, width = -(-(max_rows + 1) // _UNIT) * _UNIT, -(-max_blocks // _UNIT) * _UNIT
        self._lines = torch.zeros(_LINES, line, dtype=torch.int32, device=runtime.place)
        self.table = torch.zeros(max_rows, width, dtype=torch.int32, device=runtime.place)
        self._host_lines = runtime.staging(4 * _LINES * line).view(torch.int32).view(_LINES, line)
        self._host_table = runtime.staging(4 * max_rows * width).view(torch.int32).view(max_rows, width)
        self._numbers: Int32s = self._host_lines.numpy()
        self._blocks: Int32s = self._host_table.numpy()
        self._numbers[:], self._blocks[:] = 0, 0
        self.tokens, self.positions, self.sequence = self._lines[_TOKENS], self._lines[_POSITIONS], self._lines[_SEQUENCE]
        self.lengths, self.chunk_lengths = self._lines[_LENGTHS], self._lines[_CHUNK_LENGTHS]
        self.starts, self.logit_rows = self._lines[_STARTS], self._lines[_LOGIT_ROWS]

    def load(self, batch: Batch, pad_to: int = 0) -> Shape:
        """Raises ValueError for arrays that lead outside of pool, table or vocabulary, before anything is on its way."""
        self._check(batch)
        owners, firsts, counts = np.unique(batch.sequence, return_index=True, return_counts=True)
        order = np.argsort(firsts)
        owners, firsts, counts = owners[order], firsts[order], counts[order]
        single = (counts == 1) & ((counts == 1).cumsum() <= self._limits.max_running)
        order = np.concatenate((np.flatnonzero(single), np.flatnonzero(~single)))
        owners, firsts, counts = owners[order], firsts[order], counts[order]
        rows = np.concatenate([np.arange(first, first + count) for first, count in zip(firsts, counts, strict=True)])
        n_rows, n_single, n_chunks = len(rows), int(single.sum()), int((~single).sum())
        numbers, last = self._numbers, batch.positions[firsts + counts - 1] + 1
        numbers[_TOKENS, :n_rows], numbers[_POSITIONS, :n_rows] = batch.tokens[rows], batch.positions[rows]
        numbers[_SEQUENCE, :n_rows] = np.repeat(np.arange(len(owners)), counts)
        numbers[_LENGTHS, :n_single] = last[:n_single]
        numbers[_CHUNK_LENGTHS, :n_chunks] = last[n_single:]
        numbers[_STARTS, 0] = 0
        numbers[_STARTS, 1 : n_chunks + 1] = np.cumsum(counts[n_single:])
        place = np.empty(n_rows, np.int32)
        place[rows] = np.arange(n_rows, dtype=np.int32)
        n_logit = len(batch.logit_rows)
        numbers[_LOGIT_ROWS, :n_logit] = place[batch.logit_rows]
        width = min(batch.block_table.shape[1], self._blocks.shape[1])
        self._blocks[: len(owners), :width] = batch.block_table[owners, :width]
        self._pad(n_rows, pad_to)
        self._upload()
        self.table[: len(owners)].copy_(self._host_table[: len(owners)], non_blocking=True)
        return Shape(
            n_rows=n_rows,
            n_single=n_single,
            chunks=tuple(zip(counts[n_single:].tolist(), last[n_single:].tolist(), strict=True)),
            context=int(last[:n_single].max(initial=0)),
            in_order=n_logit == n_rows,
        )

    def pad(self, n_rows: int) -> None:
        """Rows that belong to no sequence, and nothing else."""
        self._pad(0, n_rows)
        self._upload()

    def _pad(self, begin: int, end: int) -> None:
        padding = slice(begin, max(begin, end))
        for line in (_TOKENS, _POSITIONS, _LENGTHS):
            self._numbers[line, padding] = 0
        self._numbers[_SEQUENCE, padding] = -1

    def _upload(self) -> None:
        """All lines: one copy without gaps, tens of kilobytes."""
        self._lines.copy_(self._host_lines, non_blocking=True)

    def _check(self, batch: Batch) -> None:
        tokens, positions, sequence, table = batch.tokens, batch.positions, batch.sequence, batch.block_table
        if not 0 < len(tokens) == len(positions) == len(sequence) <= self._limits.max_rows or table.ndim != 2:
            raise ValueError(f"a step has 1 to {self._limits.max_rows} rows, each with a position and a sequence; got {len(tokens)}")
        if tokens.min() < 0 or tokens.max() >= self._vocab_size or sequence.min() < 0 or sequence.max() >= len(table):
            raise ValueError("a token is not in the vocabulary, or a sequence not in the block table")
        places = positions // self._block_tokens
        if positions.min() < 0 or places.max() >= min(table.shape[1], self._blocks.shape[1]):
            raise ValueError("a position is behind the end of its block table")
        used = np.arange(table.shape[1]) <= _highest(places, sequence, len(table))[:, None]
        if ((table < 0) | (table >= self._n_blocks))[used].any():
            raise ValueError("a block table names blocks that the pool does not have")
        logit_rows = batch.logit_rows
        if len(logit_rows) != len(batch.draws) or (len(logit_rows) and not 0 <= logit_rows.min() <= logit_rows.max() < len(tokens)):
            raise ValueError("each logit row is one of the step's rows and has a draw")


def _highest(places: NDArray[np.int32], sequence: NDArray[np.int32], n: int) -> NDArray[np.int32]:
    """The last place in the table that each sequence uses; -1: none."""
    highest = np.full(n, -1, np.int32)
    np.maximum.at(highest, sequence, places)
    return highest
