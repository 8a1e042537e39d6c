"""What the two attention kernels share on the host: the pages they read, the rule of their scores, the memory of a block.

Their common code on the device is attention.cuh.
"""

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from relay.kernels.cuda_compiler import Program
from relay.kernels.cuda_library import Device
from relay.kernels.tensor_check import element, expect, shift_of

HEAD_DIMS: Final = (64, 96, 128, 256)
TILE: Final = 32  # keys
ALL_KEYS: Final = 2**31 - 1
MOST_SEQUENCES: Final = 65535  # of a grid's third dimension
_LOG2_E: Final = math.log2(math.e)
_STAGES: Final = {64: 4, 96: 3, 128: 3, 256: 2}


@dataclass(frozen=True, slots=True)
class Heads:
    """kind: the element type as CUDA calls it. group: query heads of a K/V head. page_shift: block_tokens is 2 to this power."""

    kind: str
    head_dim: int
    n_heads: int
    n_kv_heads: int
    group: int
    page_shift: int


def program(name: str, kind: str, head_dim: int) -> Program:
    return Program(name, (("ELEMENT", kind), ("HEAD_DIM", str(head_dim)), ("STAGES", str(_STAGES[head_dim]))))


def shared_bytes(head_dim: int) -> int:
    """Dynamic shared memory of a block."""
    return _STAGES[head_dim] * 2 * TILE * (head_dim + 8) * 2


def score_rule(scale: float, cap: float, window: int) -> tuple[np.float32, np.float32, np.int32]:
    """Arguments of the kernels: `ScoreRule` in attention.cuh. cap: 0 is none. window: 0 is all keys. Raises ValueError."""
    if not 0 < scale < math.inf or not 0 <= cap < math.inf or not 0 <= window <= ALL_KEYS:
        raise ValueError(
            f"scale {scale}, cap {cap} and window {window}; expected scale above 0, cap 0 (none) or more, window 0 (none) to {ALL_KEYS}"
        )
    inner = 2 * scale * _LOG2_E / cap if cap else scale * _LOG2_E
    return np.float32(inner), np.float32(cap * _LOG2_E), np.int32(window or ALL_KEYS)


def expect_paged(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor, out: Tensor, on: Device) -> Heads:
    """q, out: [rows, n_heads, head_dim]. keys, values: [n_blocks, n_kv_heads, block_tokens, head_dim], of the same type. table: int32
    [n_sequences, max_blocks]. lengths: int32 [n_sequences]. Raises ValueError for what does not fit."""
    kind = element("q", q)
    expect("q", q, (None, None, None), q.dtype, on)
    _, n_heads, head_dim = q.shape
    expect("keys", keys, (None, None, None, head_dim), q.dtype, on)
    expect("values", values, keys.shape, q.dtype, on)
    expect("lengths", lengths, (None,), torch.int32, on)
    expect("table", table, (len(lengths), None), torch.int32, on)
    expect("out", out, q.shape, q.dtype, on)
    n_kv_heads = keys.shape[1]
    if len(lengths) > MOST_SEQUENCES:
        raise ValueError(f"{len(lengths)} sequences; expected at most {MOST_SEQUENCES}")
    if head_dim not in HEAD_DIMS or n_kv_heads == 0 or n_heads % n_kv_heads:
        raise ValueError(
            f"{n_heads} heads on {n_kv_heads} K/V heads of width {head_dim}; expected whole groups, and a width of "
            + ", ".join(map(str, HEAD_DIMS))
        )
    return Heads(kind, head_dim, n_heads, n_kv_heads, n_heads // n_kv_heads, shift_of("block_tokens", keys.shape[2]))
