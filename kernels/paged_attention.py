"""Attention over a paged pool of keys and values, for decode rows and for runs of rows, in fixed splits of the context.

For one query q (a row and a head; already times the attention scale) and keys k_t, values v_t of its K/V head, split by split:

    s_t = q k_t    m = max s_t    p_t = exp(s_t - m)    l = sum p_t    o = sum p_t v_t
    and from the left:  m' = max(m, m2)  a = exp(m - m')  b = exp(m2 - m')   l' = l a + l2 b   o' = o a + o2 b     at last o / l

in float32, with keys from max(0, position - window + 1) (all of them with window 0) to the row's own position. Splits are `SPLIT` keys wide
and begin at multiples of it, whatever the batch, so a decode row's splits can go to different threads and a prefill row gets the same bits.
Source of the fold: online softmax, https://arxiv.org/abs/1805.02867

A page is [n_kv_heads, head]; what lies in a head, its order, is this kernel's own (`ORDER`, part of a pool's layout id):

    type      K                                V                                  bytes of 16 tokens and head_dim d
    bfloat16  [d / 2, 16 tokens, 2]            [8 pairs of tokens, d, 2 tokens]   32 d
    float16   [d, 16 tokens]                   [16 tokens, d]                     32 d
    int8      [d, 16 tokens], float scale[16]  [16 tokens, d], float scale[16]    16 d + 64
    float32   [d, 16 tokens]                   [16 tokens, d]                     64 d

int8: a token's vector is rounded to max|v| / 127, with one scale for K and one for V. head_dim is a multiple of 16.
"""

import ctypes
from typing import Final

import numpy as np
from numpy.typing import NDArray

from relay.kernels.cpp_library import library

ORDER: Final = "lanes"
PAGE_TOKENS: Final = 16
SPLIT: Final = 256
TILE_QUERIES: Final = 48  # the most query heads that may share a K/V head
KV_TYPES: Final = {"bfloat16": 0, "float16": 1, "int8": 2, "float32": 3}


class KVPool(ctypes.Structure):
    """As in paged_attention.h."""

    _fields_ = (
        ("base", ctypes.c_void_p),
        ("n_blocks", ctypes.c_int32),
        ("n_kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("type", ctypes.c_int32),
    )


def head_bytes(kv_type: str, head_dim: int) -> int:
    """Of K, or V, of one head in one block."""
    item = {"bfloat16": 2, "float16": 2, "int8": 1, "float32": 4}[kv_type]
    return PAGE_TOKENS * (head_dim * item + (4 if kv_type == "int8" else 0))


class PagedAttention:
    """The kernel on a pool of its own, for tests and benchmarks: a step calls it from C++."""

    def __init__(self, kv_type: str, *, n_layers: int, n_blocks: int, n_kv_heads: int, head_dim: int) -> None:
        """A pool of NaN. Raises ValueError."""
        if head_dim % PAGE_TOKENS or kv_type not in KV_TYPES:
            raise ValueError(f"heads of width {head_dim} in {kv_type}; expected a multiple of 16 and one of {', '.join(KV_TYPES)}")
        self._shape = (n_layers, 2, n_blocks, n_kv_heads)
        self.pages: NDArray[np.uint8] = np.full((*self._shape, head_bytes(kv_type, head_dim)), 255, np.uint8)
        self._pool = KVPool(self.pages.ctypes.data, n_blocks, n_kv_heads, head_dim, KV_TYPES[kv_type])

    def write(self, layer: int, side: int, block: int, slot: int, kv_head: int, vector: NDArray[np.float32]) -> None:
        """One token's K (side 0) or V (side 1) of a head. Raises IndexError, ValueError."""
        self._check(vector, (self._pool.head_dim,))
        if not (all(0 <= i < n for i, n in zip((layer, side, block, kv_head), self._shape, strict=True)) and 0 <= slot < PAGE_TOKENS):
            raise IndexError(f"layer {layer}, side {side}, block {block}, slot {slot}, head {kv_head} is not in a pool of {self._shape}")
        address = ctypes.c_void_p(vector.ctypes.data)
        library().relay_write_kv(ctypes.byref(self._pool), layer, side, block, slot, kv_head, address)

    def attend(
        self, q: NDArray[np.float32], blocks: NDArray[np.int32], *, layer: int, kv_head: int, position: int, window: int = 0
    ) -> NDArray[np.float32]:
        """q: float32 [rows, group, head_dim], scaled; the rows stand at `position` and after it. blocks: int32, of their sequence.

        Raises IndexError, ValueError.
        """
        n_rows, group, _ = q.shape
        self._check(q, (n_rows, group, self._pool.head_dim))
        if n_rows * group > TILE_QUERIES or window < 0:
            raise ValueError(
                f"{n_rows} rows of {group} heads, window {window}; expected at most {TILE_QUERIES} queries and no negative window"
            )
        n_blocks = (position + n_rows - 1) // PAGE_TOKENS + 1
        layers, _, pool_blocks, kv_heads = self._shape
        used = blocks[:n_blocks]
        if position < 0 or len(used) < n_blocks or not ((used >= 0) & (used < pool_blocks)).all() or layer >= layers or kv_head >= kv_heads:
            raise IndexError(f"position {position}, blocks {blocks.tolist()}, layer {layer}, head {kv_head} lead out of {self._shape}")
        table, out = np.ascontiguousarray(blocks, np.int32), np.empty_like(q)
        library().relay_attend(
            ctypes.byref(self._pool),
            ctypes.c_void_p(table.ctypes.data),
            layer,
            kv_head,
            group,
            window,
            position,
            n_rows,
            ctypes.c_void_p(q.ctypes.data),
            ctypes.c_void_p(out.ctypes.data),
        )
        return out

    def _check(self, array: NDArray[np.float32], shape: tuple[int, ...]) -> None:
        if array.dtype != np.float32 or array.shape != shape or not array.flags.c_contiguous:
            raise ValueError(f"{array.dtype} {array.shape} is not contiguous float32 {shape}")


def reference(
    q: NDArray[np.float64], k: NDArray[np.float64], v: NDArray[np.float64], positions: NDArray[np.int32], window: int = 0
) -> NDArray[np.float64]:
    """q: [rows, n_heads, head_dim], scaled. k, v: [tokens, n_kv_heads, head_dim]. Row r sees tokens up to positions[r]. Plain softmax."""
    group = q.shape[1] // k.shape[1]
    scores = np.einsum("rhd,thd->rht", q, np.repeat(k, group, axis=1))
    token, row = np.arange(len(k)), positions[:, None]
    seen = (token <= row) & ((token > row - window) if window else True)
    scores = np.where(seen[:, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.asarray(np.einsum("rht,thd->rhd", weights, np.repeat(v, group, axis=1)))
