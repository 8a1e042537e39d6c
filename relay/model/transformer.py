"""The forward pass of a decoder over one step's rows, in float32 and in fixed tiles: the definition of right.

In: token ids, positions, the sequence of each row and the block table. Out: the logits of the rows asked for; each row's K and V are in
the pool. A layer goes over all tiles before the next begins, and each weight matrix over all tiles before the next matrix is read.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from relay.model.attention import Split, attend, plan_splits
from relay.model.paged_kv import PagedKV
from relay.model.rope import Rope, rotate
from relay.model.tile import TILE_ROWS, TiledMatrix, rms_norm, silu_gate
from relay.model.weights import LayerWeights, Weights


@dataclass(frozen=True, slots=True)
class TilePlan:
    """What a tile needs in every layer. Padding rows repeat the last row and write nothing: `slots`: int64 [2 * n_rows * n_kv_heads]."""

    n_rows: int
    turn: tuple[Tensor, Tensor]
    slots: Tensor
    splits: list[Split]


class _Layer:
    """One layer's weights, cut for tiles."""

    def __init__(self, weights: LayerWeights) -> None:
        self.attn_norm, self.ffn_norm = weights.attn_norm, weights.ffn_norm
        self.qkv, self.attn_out = TiledMatrix(weights.qkv), TiledMatrix(weights.attn_out)
        self.gate_up, self.down = TiledMatrix(weights.gate_up), TiledMatrix(weights.down)


class Transformer:
    """Computes on one pool. Keeps no state of any sequence."""

    def __init__(self, weights: Weights, kv: PagedKV) -> None:
        self.spec = weights.spec
        self._kv = kv
        self._embedding, self._final_norm, self._head = weights.embedding, weights.final_norm, TiledMatrix(weights.head)
        self._layers = [_Layer(layer) for layer in weights.layers]
        self._rope = Rope(self.spec.head_dim, self.spec.rope_theta, self.spec.max_context)

    def forward(
        self,
        tokens: NDArray[np.int32],
        positions: NDArray[np.int32],
        sequence: NDArray[np.int32],
        block_table: NDArray[np.int32],
        logit_rows: NDArray[np.int32],
        written: Callable[[int], None],
    ) -> Tensor:
        """Arrays as in `relay.engine.runner.Batch`; `written(layer)` is called when all KV of a layer is in the pool.

        Returns float32 [len(logit_rows), vocab_size].
        """
        plans = [
            self._plan(positions[i : i + TILE_ROWS], sequence[i : i + TILE_ROWS], block_table) for i in range(0, len(tokens), TILE_ROWS)
        ]
        x = self._embedding[torch.from_numpy(_padded(tokens).astype(np.int64))]
        tiles = list(torch.split(x, TILE_ROWS))
        for i, layer in enumerate(self._layers):
            self._attention(i, layer, tiles, plans, written)
            self._network(layer, tiles)
        return self._logits(x, logit_rows)

    def _plan(self, positions: NDArray[np.int32], sequence: NDArray[np.int32], table: NDArray[np.int32]) -> TilePlan:
        block_tokens, n = self._kv.layout.block_tokens, len(positions)
        blocks = table[sequence, positions // block_tokens].astype(np.int64)
        slots = self._kv.pages(blocks[:, None])[..., 0] * block_tokens + (positions % block_tokens)[:, None]
        padded = _padded(positions)
        return TilePlan(
            n_rows=n,
            turn=self._rope.turn(torch.from_numpy(padded.astype(np.int64))),
            slots=torch.from_numpy(slots.reshape(-1)),
            splits=plan_splits(self._kv, self.spec, padded, _padded(sequence), table),
        )

    def _attention(self, i: int, layer: _Layer, tiles: list[Tensor], plans: list[TilePlan], written: Callable[[int], None]) -> None:
        spec = self.spec
        normed = [rms_norm(x, layer.attn_norm, spec.rms_eps).t() for x in tiles]
        queries = []
        for qkv, plan in zip(layer.qkv(normed), plans, strict=True):
            heads = qkv.view(-1, spec.head_dim, TILE_ROWS)
            qk, v = heads[: -spec.n_kv_heads], heads[-spec.n_kv_heads :]
            qk = rotate(qk, plan.turn)
            q, k = qk[: spec.n_heads], qk[spec.n_heads :]
            vectors = torch.stack((k, v))[..., : plan.n_rows].permute(0, 3, 1, 2)
            self._kv.write(i, plan.slots, vectors.reshape(-1, spec.head_dim))
            queries.append(q.permute(2, 0, 1).reshape(-1, spec.group, spec.head_dim))
        written(i)
        mixed = [attend(spec, self._kv, i, q, plan.splits).t() for q, plan in zip(queries, plans, strict=True)]
        _add(tiles, layer.attn_out(mixed))

    def _network(self, layer: _Layer, tiles: list[Tensor]) -> None:
        normed = [rms_norm(x, layer.ffn_norm, self.spec.rms_eps).t() for x in tiles]
        _add(tiles, layer.down([silu_gate(gate_up) for gate_up in layer.gate_up(normed)]))

    def _logits(self, x: Tensor, rows: NDArray[np.int32]) -> Tensor:
        if not len(rows):
            return x.new_empty(0, self.spec.vocab_size)
        wanted = x[torch.from_numpy(_padded(rows).astype(np.int64))]
        normed = [rms_norm(tile, self._final_norm, self.spec.rms_eps).t() for tile in torch.split(wanted, TILE_ROWS)]
        return torch.cat([logits.t() for logits in self._head(normed)])[: len(rows)]


def _padded(values: NDArray[np.int32]) -> NDArray[np.int32]:
    """[n] -> the next multiple of TILE_ROWS, the last value repeated."""
    return np.pad(values, (0, -len(values) % TILE_ROWS), mode="edge")


def _add(tiles: list[Tensor], changes: list[Tensor]) -> None:
    """tiles: [TILE_ROWS, hidden] each, changed in place; changes: [hidden, TILE_ROWS] each."""
    for x, change in zip(tiles, changes, strict=True):
        x.add_(change.t())
