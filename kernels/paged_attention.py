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

ORDER: Final = "lanes"
PAGE_TOKENS: Final = 16
SPLIT: Final = 256
TILE_QUERIES: Final = 24  # the most query heads that may share a K/V head
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
