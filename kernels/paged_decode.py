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
from relay.kernels.cuda_compiler import Program
from relay.kernels.cuda_library import CUDA, Device, Launch
from relay.kernels.paged_prefill import HEAD_DIMS, TILE, score_rule
from relay.kernels.tensor_check import ELEMENTS, element, expect, shift_of

SPLIT: Final = 256  # keys
_ROWS: Final = 16  # of a warp's query tile
_STAGES: Final = {64: 4, 96: 3, 128: 3, 256: 2}


def _program(kind: str, head_dim: int) -> Program:
    return Program("paged_decode", (("ELEMENT", kind), ("HEAD_DIM", str(head_dim)), ("STAGES", str(_STAGES[head_dim]))))


PROGRAMS: Final = tuple(_program(kind, head_dim) for kind in ELEMENTS.values() for head_dim in HEAD_DIMS)
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


def shared_bytes(head_dim: int) -> int:
    """Dynamic shared memory of a block."""
    return _STAGES[head_dim] * 2 * TILE * (head_dim + 8) * 2


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
    kind = element("q", q)
    expect("q", q, (None, None, None), q.dtype, on)
    n_sequences, n_heads, head_dim = q.shape
    expect("keys", keys, (None, None, None, head_dim), q.dtype, on)
    expect("values", values, keys.shape, q.dtype, on)
    expect("table", table, (n_sequences, None), torch.int32, on)
    expect("lengths", lengths, (n_sequences,), torch.int32, on)
    expect("out", out, q.shape, q.dtype, on)
    n_splits = work.part_o.shape[2]
    expect("work.part_o", work.part_o, (None, n_heads, n_splits, head_dim), torch.float32, on)
    expect("work.part_ml", work.part_ml, (len(work.part_o), n_heads, n_splits, 2), torch.float32, on)
    n_kv_heads = keys.shape[1]
    if head_dim not in HEAD_DIMS or n_heads % n_kv_heads or n_sequences > len(work.part_o):
        raise ValueError(
            f"{n_sequences} sequences, {n_heads} heads on {n_kv_heads} K/V heads of width {head_dim}; expected at most {len(work.part_o)} "
            f"sequences (the workspace's), whole groups of heads, and a width of {', '.join(map(str, HEAD_DIMS))}"
        )
    page_shift = shift_of("block_tokens", keys.shape[2])
    rule = score_rule(scale, cap, window)
    if n_sequences == 0:
        return
    program = _program(kind, head_dim)
    group = n_heads // n_kv_heads
    i32 = np.int32
    on.launch(
        _DECODE[program],
        (n_splits, n_kv_heads * -(-group // _ROWS), n_sequences),
        32 * -(-head_dim // 128),
        (
            q,
            keys,
            values,
            table,
            lengths,
            work.part_o,
            work.part_ml,
            i32(n_kv_heads),
            i32(group),
            i32(table.shape[1]),
            i32(page_shift),
            *rule,
        ),
        shared_bytes(head_dim),
    )
    on.launch(
        _FOLD[program],
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
