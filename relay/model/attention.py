"""Attention of one tile over the paged context, in fixed splits folded left to right.

Every (row, K/V head) is one small matrix product of fixed shape, in a batch of fixed size: TILE_ROWS rows, `SPLIT` keys, whatever the
context. For each split in turn, from m = -inf, l = 0, o = 0:

    s = cap(q k scale) + bias,  m' = max(m, max s),  p = exp(s - m'),  l' = l exp(m - m') + sum p,  o' = o exp(m - m') + p v

and a split in which a row sees nothing (its bias is -inf throughout) leaves that row's m, l, o as they are to the bit, so it doesn't matter
how far the longest row of the tile goes. Where that is a row's first split, behind its layer's window, m becomes the least that any score
is taken for (`_LEAST`), and l and o stay 0. A tile whose rows are all of one sequence gathers its context once and repeats it.

Slots that no row has written yet may hold anything, NaN too. They are cleared in the gathered copy: the pool is only read.
Source of the fold: online softmax, https://arxiv.org/abs/1805.02867
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from relay.model.paged_kv import PagedKV
from relay.model.spec import ModelSpec
from relay.model.tile import TILE_ROWS, soft_cap

SPLIT: Final = 128  # keys
_LEAST: Final = -1e30


@dataclass(frozen=True, slots=True)
class Split:
    """pages: int64 [2 * rows * n_kv_heads * SPLIT / block_tokens], rows 1 or TILE_ROWS. unwritten: int64 [n], of the gathered vectors.

    bias: by window of a layer: float32 [TILE_ROWS * n_kv_heads, group, SPLIT], 0 or -inf.
    """

    pages: Tensor
    unwritten: Tensor
    bias: dict[int, Tensor]


def plan_splits(
    kv: PagedKV, spec: ModelSpec, positions: NDArray[np.int32], sequence: NDArray[np.int32], table: NDArray[np.int32]
) -> list[Split]:
    """What to gather for one tile, and what of it rows see: the same in all layers of one window.

    positions, sequence: [TILE_ROWS]; table: [n_sequences, max_blocks]."""
    one = bool((sequence == sequence[0]).all())
    last = positions.max(keepdims=True) if one else positions
    blocks = table[sequence[:1]] if one else table[sequence]
    return [_split(kv, spec, begin, positions, last, blocks) for begin in range(0, int(positions.max()) + 1, SPLIT)]


def _split(
    kv: PagedKV, spec: ModelSpec, begin: int, positions: NDArray[np.int32], last: NDArray[np.int32], blocks: NDArray[np.int32]
) -> Split:
    """`last`: the last written position that each gathered row may see. Blocks past it are read as the sequence's first one."""
    block_tokens = kv.layout.block_tokens
    index = np.arange(begin, begin + SPLIT, block_tokens) // block_tokens
    index = np.where(index <= last[:, None] // block_tokens, index, 0)
    pages = kv.pages(np.take_along_axis(blocks, index, axis=1).astype(np.int64))
    stored = index[:, :, None] * block_tokens + np.arange(block_tokens)
    unwritten = np.broadcast_to((stored > last[:, None, None])[:, None], (*pages.shape, block_tokens))
    return Split(
        pages=torch.from_numpy(pages.reshape(-1)),
        unwritten=torch.from_numpy(np.flatnonzero(unwritten)),
        bias={window: _bias(spec, begin, positions[:, None], window) for window in spec.distinct_windows},
    )


def _bias(spec: ModelSpec, begin: int, positions: NDArray[np.int32], window: int) -> Tensor:
    keys = np.arange(begin, begin + SPLIT)
    hidden = keys > positions
    if window:
        hidden |= keys <= positions - window
    bias = torch.from_numpy(np.where(hidden, -np.inf, 0.0).astype(np.float32))
    return bias[:, None, None].expand(-1, spec.n_kv_heads, spec.group, -1).reshape(-1, spec.group, SPLIT)


def attend(spec: ModelSpec, kv: PagedKV, layer: int, q: Tensor, splits: list[Split]) -> Tensor:
    """q: float32 [TILE_ROWS * n_kv_heads, group, head_dim], contiguous -> [TILE_ROWS, n_heads * head_dim]."""
    first, *rest = splits
    top, total, mixed = _partial(spec, kv, layer, q, first, None)
    for split in rest:
        higher, more, out = _partial(spec, kv, layer, q, split, top)
        fade = (top - higher).exp_()
        top, total, mixed = higher, total.mul_(fade).add_(more), mixed.mul_(fade).add_(out)
    return mixed.div_(total).view(TILE_ROWS, -1)


def _partial(spec: ModelSpec, kv: PagedKV, layer: int, q: Tensor, split: Split, top: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """(m, l, o) of one split, m being at least `top`: [..., 1], [..., 1] and [..., head_dim]."""
    k, v = _context(spec, kv, layer, split)
    bias = split.bias[spec.windows[layer]]
    if spec.attn_softcap:
        scores = soft_cap(torch.bmm(q, k.transpose(1, 2)).mul_(spec.attn_scale), spec.attn_softcap).add_(bias)
    else:
        scores = torch.baddbmm(bias, q, k.transpose(1, 2), alpha=spec.attn_scale)
    most = scores.amax(-1, keepdim=True).clamp_min_(_LEAST)
    if top is not None:
        most = torch.maximum(top, most)
    weights = scores.sub_(most).exp_()
    return most, weights.sum(-1, keepdim=True), torch.bmm(weights, v)


def _context(spec: ModelSpec, kv: PagedKV, layer: int, split: Split) -> tuple[Tensor, Tensor]:
    """K and V: float32 [TILE_ROWS * n_kv_heads, SPLIT, head_dim] each, contiguous."""
    vectors = kv.gather(layer, split.pages).index_fill_(0, split.unwritten, 0.0)
    sides = vectors.view(2, -1, spec.n_kv_heads, SPLIT, spec.head_dim).expand(-1, TILE_ROWS, -1, -1, -1)
    k, v = sides.reshape(2, -1, SPLIT, spec.head_dim).contiguous().unbind()  # where reshape can do without a copy, strides would differ
    return k, v
