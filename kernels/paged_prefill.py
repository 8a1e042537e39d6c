"""Prefill attention: the rows of a chunk over paged KV, causal, on mma tiles. Bit for bit what `paged_decode` gives for each of the rows.

    out[t, h] = sum_j softmax_j(cap(q[t, h] . k[j, h / group] scale)) v[j, h / group]      j <= position(t), j > position(t) - window

    q, out      [n_rows, n_heads, head_dim]                            bf16 or fp16; head_dim 64, 96, 128 or 256
    keys        [n_blocks, n_kv_heads, block_tokens, head_dim]         the same type, likewise values; one layer's part of the pool
    table       [n_sequences, max_blocks]                              int32; entries past the sequence's last block are not read
    starts      [n_sequences + 1]                                      int32; the rows of sequence s are starts[s] to starts[s + 1] - 1
    lengths     [n_sequences]                                          int32; keys of the sequence; the last are the rows' own

Where the order of summation comes from: attention.cuh. `n_most` rows of one sequence set the grid, so that a graph can be captured.
Source: FlashAttention-2, arXiv 2307.08691.
"""

import math
from typing import Final

import numpy as np
import torch
from torch import Tensor

from relay.kernels.cuda_compiler import Program
from relay.kernels.cuda_library import CUDA, Device, Launch
from relay.kernels.tensor_check import ELEMENTS, element, expect, shift_of

HEAD_DIMS: Final = (64, 96, 128, 256)
TILE: Final = 32
ALL_KEYS: Final = 2**31 - 1
_LOG2_E: Final = math.log2(math.e)
_THREADS: Final = 256
_STAGES: Final = {64: 4, 96: 3, 128: 3, 256: 2}


def _program(kind: str, head_dim: int) -> Program:
    return Program("paged_prefill", (("ELEMENT", kind), ("HEAD_DIM", str(head_dim)), ("STAGES", str(_STAGES[head_dim]))))


_LAUNCH: Final = {
    (kind, head_dim): Launch(_program(kind, head_dim), "paged_prefill") for kind in ELEMENTS.values() for head_dim in HEAD_DIMS
}
PROGRAMS: Final = tuple(launch.program for launch in _LAUNCH.values())


def _row_tile(head_dim: int) -> int:
    """Query rows of a block."""
    return 64 if head_dim > 128 else 128


def score_rule(scale: float, cap: float, window: int) -> tuple[np.float32, np.float32, np.int32]:
    """Arguments of the kernels: `ScoreRule` in attention.cuh. cap: 0 is none. window: 0 is all keys. Raises ValueError."""
    if not 0 < scale < math.inf or not 0 <= cap < math.inf or window < 0:
        raise ValueError(f"scale {scale}, cap {cap} and window {window}; expected scale above 0, cap and window 0 (none) or more")
    inner = 2 * scale * _LOG2_E / cap if cap else scale * _LOG2_E
    return np.float32(inner), np.float32(cap * _LOG2_E), np.int32(window or ALL_KEYS)


def shared_bytes(head_dim: int) -> int:
    """Dynamic shared memory of a block."""
    return _STAGES[head_dim] * 2 * TILE * (head_dim + 8) * 2


def paged_prefill(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    starts: Tensor,
    lengths: Tensor,
    out: Tensor,
    *,
    n_most: int,
    scale: float,
    cap: float = 0.0,
    window: int = 0,
    on: Device = CUDA,
) -> None:
    """Writes `out`. Rows of a sequence past `n_most` are left out. Raises ValueError; what int32 tensors say is the caller's promise."""
    kind = element("q", q)
    expect("q", q, (None, None, None), q.dtype, on)
    n_rows, n_heads, head_dim = q.shape
    expect("keys", keys, (None, None, None, head_dim), q.dtype, on)
    expect("values", values, keys.shape, q.dtype, on)
    n_sequences = len(lengths)
    expect("lengths", lengths, (None,), torch.int32, on)
    expect("table", table, (n_sequences, None), torch.int32, on)
    expect("starts", starts, (n_sequences + 1,), torch.int32, on)
    expect("out", out, q.shape, q.dtype, on)
    n_kv_heads = keys.shape[1]
    if head_dim not in HEAD_DIMS or n_heads % n_kv_heads:
        raise ValueError(
            f"{n_heads} heads on {n_kv_heads} K/V heads of width {head_dim}; expected whole groups, and a width of "
            + ", ".join(map(str, HEAD_DIMS))
        )
    page_shift = shift_of("block_tokens", keys.shape[2])
    rule = score_rule(scale, cap, window)
    group = n_heads // n_kv_heads
    n_tiles = -(-min(n_most, n_rows) * group // _row_tile(head_dim))
    if n_tiles < 1 or n_sequences == 0:
        return
    i32 = np.int32
    shape = (i32(n_kv_heads), i32(group), i32(table.shape[1]), i32(page_shift))
    arguments = (q, keys, values, table, starts, lengths, out, *shape, *rule)
    on.launch(_LAUNCH[kind, head_dim], (n_tiles, n_kv_heads, n_sequences), _THREADS, arguments, shared_bytes(head_dim))


def reference(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    starts: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    cap: float = 0.0,
    window: int = 0,
) -> Tensor:
    """The same in float64: [n_rows, n_heads, head_dim]."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    for s, length in enumerate(lengths.tolist()):
        begin, end = int(starts[s]), int(starts[s + 1])
        if begin == end:
            continue
        blocks = table[s, : -(-length // keys.shape[2])].long()
        k, v = (pool[blocks].transpose(1, 2).flatten(0, 1)[:length].double() for pool in (keys, values))  # [length, n_kv_heads, head_dim]
        group = q.shape[1] // k.shape[1]
        scores = torch.einsum("thd,jhd->thj", q[begin:end].double(), k.repeat_interleave(group, 1)) * scale
        if cap:
            scores = cap * torch.tanh(scores / cap)
        position, key = torch.arange(length - end + begin, length)[:, None], torch.arange(length)
        seen = (key <= position) & (key > position - (window or ALL_KEYS))
        weights = torch.softmax(scores.masked_fill(~seen[:, None, :], -torch.inf), -1)
        out[begin:end] = torch.einsum("thj,jhd->thd", weights, v.repeat_interleave(group, 1))
    return out
