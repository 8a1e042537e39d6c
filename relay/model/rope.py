"""Rotary position embeddings, half-split: element i of a head is paired with element i + head_dim/2.

    (a, b) at position p  ->  (a cos t - b sin t, b cos t + a sin t),   t = p * theta^(-2i / head_dim)

Tables are computed in float64 and applied in float32. Source: RoFormer, https://arxiv.org/abs/2104.09864
"""

import torch
from torch import Tensor


class Rope:
    """Tables for all positions of a model."""

    def __init__(self, head_dim: int, theta: float, max_context: int) -> None:
        pairs = torch.arange(0, head_dim, 2, dtype=torch.float64)
        angles = torch.arange(max_context, dtype=torch.float64)[:, None] * theta ** (-pairs / head_dim)
        self._cos = angles.cos().float()
        self._sin = angles.sin().float()

    def turn(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """int64 [rows] -> (cos [head_dim/2, rows], signed sin [2, head_dim/2, rows]) for `rotate`."""
        cos, sin = self._cos[positions].t().contiguous(), self._sin[positions].t()
        return cos, torch.stack((-sin, sin))


def rotate(heads: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """heads: float32 [n_heads, head_dim, rows], features first -> the same shape, contiguous."""
    cos, sin = turn
    n_heads, head_dim, rows = heads.shape
    halves = heads.view(n_heads, 2, head_dim // 2, rows)
    return (halves * cos).add_(halves.flip(1).mul_(sin)).view(n_heads, head_dim, rows)
