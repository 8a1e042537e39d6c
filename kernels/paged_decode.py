"""Decode attention: one query token per sequence over its paged keys and values, split along the keys by a fixed rule.

    out[s, h] = sum_j softmax_j(cap(q[s, h] . k[j, h / group] scale)) v[j, h / group]      j < lengths[s], j >= lengths[s] - window

    q, out      [n_sequences, n_heads, head_dim]                       bf16 or fp16; head_dim 64, 96, 128 or 256
    keys        [n_blocks, n_kv_heads, block_tokens, head_dim]         the same type, likewise values; one layer's part of the pool
    table       [n_sequences, max_blocks]                              int32; entries past the sequence's last block are not read
    lengths     [n_sequences]                                          int32; keys of the sequence, its own included; 0: the row becomes 0

A split is 256 keys, whatever the batch and the context, and splits are folded left to right: a row's bits depend on its own q, keys and
values, and are those of `paged_prefill`. A sequence longer than the workspace was made for becomes NaN.
Source: FlashDecoding, pytorch.org/blog/flash-decoding.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from relay.kernels import paged_prefill
from relay.kernels.attention import HEAD_DIMS, expect_paged, program, score_rule, shared_bytes
from relay.kernels.cuda_library import CUDA, Device, Launch
from relay.kernels.tensor_check import ELEMENTS, expect

SPLIT: Final = 256  # keys
_ROWS: Final = 16  # of a warp's query tile

PROGRAMS: Final = tuple(program("paged_decode", kind, head_dim) for kind in ELEMENTS.values() for head_dim in HEAD_DIMS)
_DECODE: Final = {program: Launch(program, "paged_decode") for program in PROGRAMS}
_FOLD: Final = {program: Launch(program, "paged_decode_fold") for program in PROGRAMS}


@dataclass(frozen=True, slots=True)
class Workspace:
    """Parts of rows between the two kernels. part_o: float32 [n_sequences, n_heads, n_splits, head_dim]; part_ml: [..., n_splits, 2]."""

    part_o: Tensor
    part_ml: Tensor


def workspace(n_sequences: int, n_heads: int, head_dim: int, max_context: int, device: torch.device) -> Workspace:
    """For batches of up to `n_sequences` with up to `max_context` keys each; used again at every step and layer."""
    n_splits = max(1, -(-max_context // SPLIT))
    return Workspace(
        part_o=torch.empty(n_sequences, n_heads, n_splits, head_dim, dtype=torch.float32, device=device),
        part_ml=torch.empty(n_sequences, n_heads, n_splits, 2, dtype=torch.float32, device=device),
    )


def paged_decode(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    lengths: Tensor,
    out: Tensor,
    work: Workspace,
    *,
    scale: float,
    cap: float = 0.0,
    window: int = 0,
    on: Device = CUDA,
) -> None:
    """Writes `out`. Raises ValueError for tensors that do not fit; what is in `table` and `lengths` is the caller's promise."""
    heads = expect_paged(q, keys, values, table, lengths, out, on)
    n_sequences, n_heads, head_dim = q.shape
    expect("lengths", lengths, (n_sequences,), torch.int32, on)
    n_splits = work.part_o.shape[2]
    expect("work.part_o", work.part_o, (None, n_heads, n_splits, head_dim), torch.float32, on)
    expect("work.part_ml", work.part_ml, (len(work.part_o), n_heads, n_splits, 2), torch.float32, on)
    if n_sequences > len(work.part_o) or n_splits == 0:
        raise ValueError(f"{n_sequences} sequences; the workspace was made for {len(work.part_o)} with {n_splits} splits")
    rule = score_rule(scale, cap, window)
    if n_sequences == 0:
        return
    chosen = program("paged_decode", heads.kind, head_dim)
    i32 = np.int32
    on.launch(
        _DECODE[chosen],
        (n_splits, heads.n_kv_heads * -(-heads.group // _ROWS), n_sequences),
        32 * -(-head_dim // 128),
        (
            q,
            keys,
            values,
            table,
            lengths,
            work.part_o,
            work.part_ml,
            i32(heads.n_kv_heads),
            i32(heads.group),
            i32(table.shape[1]),
            i32(heads.page_shift),
            *rule,
        ),
        shared_bytes(head_dim),
    )
    on.launch(
        _FOLD[chosen],
        (n_sequences * n_heads, 1, 1),
        head_dim,
        (work.part_o, work.part_ml, lengths, out, i32(n_heads), i32(n_splits), rule[2]),
    )


def reference(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor, *, scale: float, cap: float = 0.0, window: int = 0
) -> Tensor:
    """The same in float64: [n_sequences, n_heads, head_dim]."""
    starts = torch.arange(len(q) + 1)
    return paged_prefill.reference(q, keys, values, table, starts, lengths, scale=scale, cap=cap, window=window)
