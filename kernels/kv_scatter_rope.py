"""Rotary embedding of a step's queries and keys, and its keys and values written into the paged pool, in one pass.

    (a, b) -> (a cos t - b sin t, b cos t + a sin t)      element i and element i + head_dim / 2 of a head; t: angle i of the row's position

    qkv         [n_rows, (n_heads + 2 n_kv_heads) * head_dim]          bf16 or fp16; heads of q, k, v in turn; head_dim a multiple of 16
    cos, sin    [n_positions, head_dim / 2]                            float32, `relay.model.rope`'s tables
    positions   [n_rows]                                               int32
    sequence    [n_rows]                                               int32, the row of `table`; -1: padding, nothing goes into the pool
    table       [n_sequences, max_blocks]                              int32
    q           [n_rows, n_heads, head_dim]                            out, turned
    keys        [n_blocks, n_kv_heads, block_tokens, head_dim]         out, likewise values; slot: position % block_tokens

Every operation is rounded to float32 by itself and the result to the element's type: equal to the reference to the bit.
Source: RoFormer, arXiv 2104.09864.
"""

from typing import Final

import numpy as np
import torch
from torch import Tensor

from relay.kernels.cuda_compiler import Program
from relay.kernels.cuda_library import CUDA, Device, Launch
from relay.kernels.tensor_check import ELEMENTS, element, expect, shift_of

PROGRAMS: Final = tuple(Program("kv_scatter_rope", (("ELEMENT", kind),)) for kind in ELEMENTS.values())
_LAUNCH: Final = {program.macros[0][1]: Launch(program, "kv_scatter_rope") for program in PROGRAMS}
_THREADS: Final = 128


def kv_scatter_rope(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    sequence: Tensor,
    table: Tensor,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    on: Device = CUDA,
) -> None:
    """Writes `q`, `keys` and `values`. Raises ValueError for tensors that do not fit; positions and table are the caller's promise."""
    kind = element("qkv", qkv)
    expect("q", q, (None, None, None), qkv.dtype, on)
    n_rows, n_heads, head_dim = q.shape
    expect("keys", keys, (None, None, None, head_dim), qkv.dtype, on)
    expect("values", values, keys.shape, qkv.dtype, on)
    n_kv_heads = keys.shape[1]
    expect("qkv", qkv, (n_rows, (n_heads + 2 * n_kv_heads) * head_dim), qkv.dtype, on)
    expect("cos", cos, (None, head_dim // 2), torch.float32, on)
    expect("sin", sin, cos.shape, torch.float32, on)
    expect("positions", positions, (n_rows,), torch.int32, on)
    expect("sequence", sequence, (n_rows,), torch.int32, on)
    expect("table", table, (None, None), torch.int32, on)
    if head_dim % 16:
        raise ValueError(f"head_dim is {head_dim}; expected a multiple of 16")
    page_shift = shift_of("block_tokens", keys.shape[2])
    if n_rows == 0:
        return
    i32 = np.int32
    shape = (i32(n_heads), i32(n_kv_heads), i32(head_dim), i32(table.shape[1]), i32(page_shift))
    on.launch(_LAUNCH[kind], (n_rows, 1, 1), _THREADS, (qkv, cos, sin, positions, sequence, table, q, keys, values, *shape))


def reference(
    qkv: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, sequence: Tensor, table: Tensor, q: Tensor, keys: Tensor, values: Tensor
) -> None:
    """The same in torch."""
    n_rows, n_heads, head_dim = q.shape
    n_kv_heads, block_tokens = keys.shape[1], keys.shape[2]
    heads = qkv.view(n_rows, n_heads + 2 * n_kv_heads, 2, head_dim // 2)
    turned, plain = heads[:, : n_heads + n_kv_heads].float(), heads[:, n_heads + n_kv_heads :]
    a, b = turned.unbind(2)
    c, s = cos[positions.long()][:, None], sin[positions.long()][:, None]
    turned = torch.stack((a * c - b * s, b * c + a * s), 2).to(qkv.dtype).flatten(2)
    q.copy_(turned[:, :n_heads])
    rows = torch.nonzero(sequence >= 0).flatten()
    at = positions[rows].long()
    blocks = table[sequence[rows].long(), at // block_tokens].long()
    keys[blocks, :, at % block_tokens] = turned[rows, n_heads:]
    values[blocks, :, at % block_tokens] = plain[rows].flatten(2)
