"""Paged keys and values for the tests of kernels: blocks in random order, and NaN in every slot that nobody wrote."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Paged:
    """One layer's pool, and the sequences in it. keys, values: [n_blocks, n_kv_heads, block_tokens, head_dim]."""

    keys: Tensor
    values: Tensor
    table: Tensor
    lengths: Tensor

    def only(self, *rows: int) -> "Paged":
        """Some of the sequences, in the same pool."""
        return Paged(self.keys, self.values, self.table[list(rows)].contiguous(), self.lengths[list(rows)].contiguous())


def paged(
    lengths: Sequence[int],
    *,
    n_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    block_tokens: int = 16,
    seed: int = 0,
    order_seed: int = 0,
) -> Paged:
    """`seed` makes the numbers, `order_seed` says where they lie."""
    values = torch.Generator().manual_seed(seed)
    order = torch.Generator().manual_seed(order_seed)
    needed = [-(-n // block_tokens) for n in lengths]
    n_blocks = sum(needed) + 2
    free = torch.randperm(n_blocks, generator=order).int()
    shape = (n_blocks, n_kv_heads, block_tokens, head_dim)
    pool = torch.full((2, *shape), float("nan"), dtype=dtype)
    table = torch.full((len(lengths), max(needed, default=0) + 1), -1, dtype=torch.int32)
    for s, (length, n) in enumerate(zip(lengths, needed, strict=True)):
        table[s, :n], free = free[:n], free[n:]
        vectors = torch.randn(2, length, n_kv_heads, head_dim, generator=values).to(dtype)
        for block in range(n):
            part = vectors[:, block * block_tokens : (block + 1) * block_tokens]
            pool[:, table[s, block], :, : part.shape[1]] = part.transpose(1, 2)
    return Paged(pool[0], pool[1], table, torch.tensor(lengths, dtype=torch.int32))


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal also where NaN, and 0 is not -0."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def relative_error(got: Tensor, want: Tensor) -> float:
    """Of the whole, in the Euclidean norm; NaN where something is NaN."""
    return float((got.double() - want).norm() / want.norm().clamp_min(1e-30))
