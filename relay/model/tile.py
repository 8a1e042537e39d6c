"""Fixed tiles: the one shape in which numbers of a row are mixed, and the reason why a row never notices its neighbours.

torch and the BLAS below it choose a kernel, and with it an order of summation, by the shape of what they are given. So rows are computed
in tiles of exactly `TILE_ROWS`, padded where there are fewer: the shape is always the same, and what is left to show (and is tested) is
that a row's result depends neither on its place in the tile nor on the other rows, nor on how many threads there are. The shape includes
the strides: a view where the same numbers are contiguous elsewhere chose another order (tried). Of elementwise operations only those are
used here whose vector loop and scalar tail agree to the bit: + - * / are correctly rounded, and torch's `exp` is one routine for both,
while its `silu` is not (tried: it differs at the edges of a thread's share).
"""

from collections.abc import Sequence
from math import pi
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.functional import rms_norm as _rms_norm

TILE_ROWS: Final = 16
_SQRT_2_PI: Final = (2.0 / pi) ** 0.5
_LEAST_ROWS: Final = 64  # of a weight that is multiplied at once: with 5, 6, 7, 9 or 10, sums differed between one thread and two
_CHUNK_BYTES: Final = 8 << 20  # of a weight: stays in the last-level cache while all tiles pass over it


class TiledMatrix:
    """y = W x for tiles; W: float32 [n_out, n_in]. Cut into chunks of rows, so that each is read from DRAM once a step, not once a tile."""

    def __init__(self, weight: Tensor) -> None:
        self.n_out, self.n_in = weight.shape
        if self.n_out < _LEAST_ROWS:
            weight = pad(weight, (0, 0, 0, _LEAST_ROWS - self.n_out))
        rows = max(_LEAST_ROWS, _CHUNK_BYTES // (4 * self.n_in) // TILE_ROWS * TILE_ROWS)
        n_more = max(1, len(weight) // rows) - 1
        self._chunks = torch.split(weight, [rows] * n_more + [len(weight) - rows * n_more])  # what is left over goes to the last

    def __call__(self, tiles: Sequence[Tensor]) -> list[Tensor]:
        """tiles: float32 [n_in, TILE_ROWS] each -> [n_out, TILE_ROWS] each: features first, which is what BLAS is fastest at (measured)."""
        if len(self._chunks) == 1:
            return [torch.mm(self._chunks[0], x)[: self.n_out] for x in tiles]
        outs = [x.new_empty(self.n_out, TILE_ROWS) for x in tiles]
        begin = 0
        for chunk in self._chunks:
            end = begin + len(chunk)
            for x, out in zip(tiles, outs, strict=True):
                torch.mm(chunk, x, out=out[begin:end])
            begin = end
        return outs


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; x: float32 [TILE_ROWS, ..., width]."""
    return _rms_norm(x, weight.shape, weight, eps)


def rms_norm_features(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The same for features first: x: float32 [n * width, TILE_ROWS], each group of `width` features by itself -> the same shape."""
    groups = x.view(-1, len(weight), x.shape[-1]).permute(2, 0, 1).contiguous()
    return rms_norm(groups, weight, eps).permute(1, 2, 0).reshape(x.shape)


def silu_gate(gate_up: Tensor) -> Tensor:
    """gate / (1 + exp(-gate)) * up; gate_up: float32 [2 * ffn, TILE_ROWS] -> [ffn, TILE_ROWS]."""
    gate, up = gate_up.chunk(2)
    return gate.div(gate.neg().exp_().add_(1.0)).mul_(up)


def gelu_tanh_gate(gate_up: Tensor) -> Tensor:
    """gate (1 + tanh(t)) / 2 * up with t = sqrt(2 / pi) (gate + 0.044715 gate^3); (1 + tanh(t)) / 2 is 1 / (1 + exp(-2 t)). As above."""
    gate, up = gate_up.chunk(2)
    twice = gate.mul(gate).mul_(2 * _SQRT_2_PI * 0.044715).add_(2 * _SQRT_2_PI).mul_(gate)
    return gate.div(twice.neg_().exp_().add_(1.0)).mul_(up)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """cap tanh(x / cap), in place; tanh(t) is 1 - 2 / (exp(2 t) + 1)."""
    return x.mul_(2.0 / cap).exp_().add_(1.0).reciprocal_().mul_(-2.0).add_(1.0).mul_(cap)


GATES: Final = {"silu": silu_gate, "gelu_tanh": gelu_tanh_gate}
