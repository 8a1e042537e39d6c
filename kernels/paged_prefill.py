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

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from relay.kernels.attention import ALL_KEYS, HEAD_DIMS, expect_paged, program, score_rule, shared_bytes
from relay.kernels.cuda_library import CUDA, Device, Launch
from relay.kernels.tensor_check import ELEMENTS, expect

_THREADS: Final = 256

_LAUNCH: Final = {
    (kind, head_dim): Launch(program("paged_prefill", kind, head_dim), "paged_prefill")
    for kind in ELEMENTS.values()
    for head_dim in HEAD_DIMS
}
PROGRAMS: Final = tuple(launch.program for launch in _LAUNCH.values())


def _row_tile(head_dim: int) -> int:
    """Query rows of a block."""
    return 64 if head_dim > 128 else 128


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
    heads = expect_paged(q, keys, values, table, lengths, out, on)
    n_sequences = len(lengths)
    expect("starts", starts, (n_sequences + 1,), torch.int32, on)
    rule = score_rule(scale, cap, window)
    n_tiles = -(-min(n_most, len(q)) * heads.group // _row_tile(heads.head_dim))
    if n_tiles < 1 or n_sequences == 0:
        return
    i32 = np.int32
    shape = (i32(heads.n_kv_heads), i32(heads.group), i32(table.shape[1]), i32(heads.page_shift))
    arguments = (q, keys, values, table, starts, lengths, out, *shape, *rule)
    launch, grid = _LAUNCH[heads.kind, heads.head_dim], (n_tiles, heads.n_kv_heads, n_sequences)
    on.launch(launch, grid, _THREADS, arguments, shared_bytes(heads.head_dim))


def torch_prefill(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    chunks: Sequence[tuple[int, int]],
    out: Tensor,
    *,
    scale: float,
    window: int = 0,
) -> None:
    """Writes `out` by torch's own attention, for where that is faster: without a cap, and with bits that depend on the chunk.

    chunks: (rows, keys) of each sequence, as `starts` and `lengths` say on the device. Keys and values are copied out of the pool first.
    """
    begin = 0
    for (n_rows, n_keys), blocks in zip(chunks, table, strict=True):
        there = blocks[: -(-n_keys // keys.shape[2])]
        k, v = (pool.index_select(0, there).transpose(0, 1).flatten(1, 2)[None, :, :n_keys] for pool in (keys, values))
        rows = slice(begin, begin + n_rows)
        seen = _seen(n_rows, n_keys, window, q.device) if window else causal_lower_right(n_rows, n_keys)
        mixed = scaled_dot_product_attention(q[rows].transpose(0, 1)[None], k, v, attn_mask=seen, scale=scale, enable_gqa=True)
        out[rows] = mixed[0].transpose(0, 1)
        begin += n_rows


def _seen(n_rows: int, n_keys: int, window: int, place: torch.device) -> Tensor:
    """bool [n_rows, n_keys]: the rows are the last of the keys."""
    row, key = torch.arange(n_keys - n_rows, n_keys, device=place)[:, None], torch.arange(n_keys, device=place)
    return (key <= row) & (key > row - window)


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
