"""Rotary position embeddings, half-split: element i of a head is paired with element i + head_dim/2.

    (a, b) at position p  ->  (a cos t - b sin t, b cos t + a sin t),   t = p * frequency[i]

with the frequencies of a `RopeSpec`, and both cos and sin times its magnitude. Tables are computed in float64, by numpy, on one thread:
every process has the same. They are applied in float32. Source: RoFormer, https://arxiv.org/abs/2104.09864
"""

from typing import Final

import numpy as np
import torch
from torch import Tensor

from relay.model.rope_spec import RopeSpec

_CHUNK: Final = 8192  # positions whose angles are there in float64 at once


class Rope:
    """Tables for positions from 0. cos, sin: float32 [n_positions, head_dim / 2]."""

    def __init__(self, spec: RopeSpec, head_dim: int, n_positions: int) -> None:
        frequencies = spec.frequencies(head_dim)
        self.cos = torch.empty(n_positions, head_dim // 2)
        self.sin = torch.empty(n_positions, head_dim // 2)
        for begin in range(0, n_positions, _CHUNK):
            end = min(begin + _CHUNK, n_positions)
            angles = np.arange(begin, end)[:, None] * frequencies
            self.cos[begin:end] = torch.from_numpy((np.cos(angles) * spec.magnitude).astype(np.float32))
            self.sin[begin:end] = torch.from_numpy((np.sin(angles) * spec.magnitude).astype(np.float32))

    def turn(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """int64 [rows] -> (cos [head_dim/2, rows], signed sin [2, head_dim/2, rows]) for `rotate`."""
        cos, sin = self.cos[positions].t().contiguous(), self.sin[positions].t()
        return cos, torch.stack((-sin, sin))


def rotate(heads: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """heads: float32 [n_heads, head_dim, rows], features first -> the same shape, contiguous."""
    cos, sin = turn
    n_heads, head_dim, rows = heads.shape
    halves = heads.reshape(n_heads, 2, head_dim // 2, rows)
    return (halves * cos).add_(halves.flip(1).mul_(sin)).view(n_heads, head_dim, rows)
