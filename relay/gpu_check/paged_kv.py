"""Paged keys and values of one layer, in blocks of random order, on a section's device."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from relay.gpu_check.stage import Stage

BLOCK = 16


@dataclass(frozen=True)
class Paged:
    """keys, values: [n_blocks, n_kv_heads, 16, head_dim]; table: int32 [n, blocks]; lengths: int32 [n]."""

    keys: Tensor
    values: Tensor
    table: Tensor
    lengths: Tensor

    @property
    def n_bytes(self) -> int:
        """Of the keys and values that the sequences have."""
        return int(self.lengths.sum()) * 2 * self.keys.shape[1] * self.keys.shape[3] * 2

    def only(self, i: int) -> "Paged":
        """One of the sequences."""
        return Paged(self.keys, self.values, self.table[i : i + 1].clone(), self.lengths[i : i + 1].clone())

    def to_cpu(self) -> "Paged":
        return Paged(self.keys.cpu(), self.values.cpu(), self.table.cpu(), self.lengths.cpu())


def paged(stage: Stage, lengths: Sequence[int], n_kv_heads: int, head_dim: int) -> Paged:
    needed = [-(-n // BLOCK) for n in lengths]
    n_blocks = sum(needed) + 1
    order = torch.randperm(n_blocks, generator=torch.Generator().manual_seed(5)).int()
    table = torch.full((len(lengths), -(-max(needed) // 4) * 4), -1, dtype=torch.int32)
    at = 0
    for row, n in zip(table, needed, strict=True):
        row[:n] = order[at : at + n]
        at += n
    keys, values = (stage.normal(n_blocks, n_kv_heads, BLOCK, head_dim) for _ in range(2))
    return Paged(keys, values, table.to(stage.place), torch.tensor(lengths, dtype=torch.int32).to(stage.place))
