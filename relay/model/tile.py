"""Fixed tiles: the one shape in which numbers of a row are mixed, and the reason why a row never notices its neighbours.

torch and the BLAS below it choose a kernel, and with it an order of summation, by the shape of what they are given. So rows are computed
in tiles of exactly `TILE_ROWS`, padded where there are fewer: the shape is always the same, and what is left to show (and is tested) is
that a row's result depends neither on its place in the tile nor on the other rows. Of elementwise operations only those are used here
whose vector loop and scalar tail agree to the bit: + - * / are correctly rounded, and torch's `exp` is one routine for both, while its
`silu` is not (tried: it differs at the edges of a thread's share).
"""

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import rms_norm as _rms_norm

TILE_ROWS: Final = 16
_CHUNK_BYTES: Final = 8 << 20  # of a weight: stays in the last-level cache while all tiles pass over it


class TiledMatrix:
    """y = W x for tiles; W: float32 [n_out, n_in]. Cut into chunks of rows, so that each is read from DRAM once a step, not once a tile."""

    def __init__(self, weight: Tensor) -> None:
        self.n_out, self.n_in = weight.shape
        rows = max(TILE_ROWS, _CHUNK_BYTES // (4 * self.n_in) // TILE_ROWS * TILE_ROWS)
        self._chunks = torch.split(weight, rows)

    def __call__(self, tiles: Sequence[Tensor]) -> list[Tensor]:
        """tiles: float32 [n_in, TILE_ROWS] each -> [n_out, TILE_ROWS] each: features first, which is what BLAS is fastest at (measured)."""
        if len(self._chunks) == 1:
            return [torch.mm(self._chunks[0], x) for x in tiles]
        outs = [x.new_empty(self.n_out, TILE_ROWS) for x in tiles]
        begin = 0
        for chunk in self._chunks:
            end = begin + len(chunk)
            for x, out in zip(tiles, outs, strict=True):
                torch.mm(chunk, x, out=out[begin:end])
            begin = end
        return outs


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; x: float32 [TILE_ROWS, width]."""
    return _rms_norm(x, weight.shape, weight, eps)


def silu_gate(gate_up: Tensor) -> Tensor:
    """gate / (1 + exp(-gate)) * up; gate_up: float32 [2 * ffn, TILE_ROWS] -> [ffn, TILE_ROWS]."""
    gate, up = gate_up.chunk(2)
    return gate.div(gate.neg().exp_().add_(1.0)).mul_(up)
