"""The forward pass of a decoder over one step's rows, in float32 and in fixed tiles: the definition of right.

In: token ids, positions, the sequence of each row and the block table. Out: the logits of the rows asked for; each row's K and V are in
the pool. A layer goes over all tiles before the next begins, and each weight matrix over all tiles before the next matrix is read.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from relay.model.attention import Split, attend, plan_splits
from relay.model.experts import Experts
from relay.model.paged_kv import PagedKV
from relay.model.rope import Rope, rotate
from relay.model.spec import ModelSpec
from relay.model.tile import GATES, TILE_ROWS, TiledMatrix, rms_norm, rms_norm_features, soft_cap
from relay.model.weights import LayerWeights, NetworkWeights, Weights


@dataclass(frozen=True, slots=True)
class TilePlan:
    """What a tile needs in every layer. Padding rows repeat the last row and write nothing: `slots`: int64 [2 * n_rows * n_kv_heads].

    turns: by window of a layer, for a layer with one may have other angles.
    """

    n_rows: int
    turns: dict[int, tuple[Tensor, Tensor]]
    slots: Tensor
    splits: list[Split]


class _Network:
    """A gated network, cut for tiles."""

    def __init__(self, spec: ModelSpec, weights: NetworkWeights) -> None:
        self._gate_up, self._down = TiledMatrix(weights.gate_up), TiledMatrix(weights.down)
        self._gate = GATES[spec.traits.activation]

    def __call__(self, tiles: Sequence[Tensor]) -> list[Tensor]:
        return self._down([self._gate(gate_up) for gate_up in self._gate_up(tiles)])


class _Layer:
    """One layer's weights, cut for tiles."""

    def __init__(self, spec: ModelSpec, weights: LayerWeights) -> None:
        self.norms = weights
        self.qkv, self.attn_out = TiledMatrix(weights.qkv), TiledMatrix(weights.attn_out)
        self.bias = None if weights.qkv_bias is None else weights.qkv_bias[:, None]
        networks = [_Network(spec, network) for network in weights.networks]
        self.network = networks[0]
        self.experts = (
            Experts(weights.router, networks, n_used=spec.n_used, renormalized=spec.renormalized) if weights.router is not None else None
        )


class Transformer:
    """Computes on one pool. Keeps no state of any sequence."""

    def __init__(self, weights: Weights, kv: PagedKV) -> None:
        self.spec = spec = weights.spec
        self._kv = kv
        self._embedding, self._final_norm, self._head = weights.embedding, weights.final_norm, TiledMatrix(weights.head)
        self._layers = [_Layer(spec, layer) for layer in weights.layers]
        n_positions = min(spec.max_context, kv.layout.n_blocks * kv.layout.block_tokens)
        rope = Rope(spec.rope, spec.head_dim, n_positions)
        local = rope if spec.local_rope is None else Rope(spec.local_rope, spec.head_dim, n_positions)
        self._ropes = {window: local if window else rope for window in spec.distinct_windows}

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
        if self.spec.traits.scaled_embedding:
            x.mul_(self.spec.hidden**0.5)
        tiles = list(torch.split(x, TILE_ROWS))
        for i, layer in enumerate(self._layers):
            self._attention(i, layer, tiles, plans, written)
            self._network(layer, tiles, len(tokens))
        return self._logits(x, logit_rows)

    def _plan(self, positions: NDArray[np.int32], sequence: NDArray[np.int32], table: NDArray[np.int32]) -> TilePlan:
        block_tokens, n = self._kv.layout.block_tokens, len(positions)
        blocks = table[sequence, positions // block_tokens].astype(np.int64)
        slots = self._kv.pages(blocks[:, None])[..., 0] * block_tokens + (positions % block_tokens)[:, None]
        padded = _padded(positions)
        return TilePlan(
            n_rows=n,
            turns={window: rope.turn(torch.from_numpy(padded.astype(np.int64))) for window, rope in self._ropes.items()},
            slots=torch.from_numpy(slots.reshape(-1)),
            splits=plan_splits(self._kv, self.spec, padded, _padded(sequence), table),
        )

    def _attention(self, i: int, layer: _Layer, tiles: list[Tensor], plans: list[TilePlan], written: Callable[[int], None]) -> None:
        spec, norms = self.spec, layer.norms
        queries = []
        for qkv, plan in zip(layer.qkv(self._normed(tiles, norms.attn_norm)), plans, strict=True):
            q, k, v = self._heads(layer, qkv)
            qk = rotate(torch.cat((q, k)).view(-1, spec.head_dim, TILE_ROWS), plan.turns[spec.windows[i]])
            q, k = qk[: spec.n_heads], qk[spec.n_heads :]
            vectors = torch.stack((k, v.view(-1, spec.head_dim, TILE_ROWS)))[..., : plan.n_rows].permute(0, 3, 1, 2)
            self._kv.write(i, plan.slots, vectors.reshape(-1, spec.head_dim))
            queries.append(q.permute(2, 0, 1).reshape(-1, spec.group, spec.head_dim).contiguous())
        written(i)
        mixed = [attend(spec, self._kv, i, q, plan.splits).t() for q, plan in zip(queries, plans, strict=True)]
        self._add(tiles, layer.attn_out(mixed), norms.post_attn_norm)

    def _heads(self, layer: _Layer, qkv: Tensor) -> list[Tensor]:
        """q, k and v before rope: [heads * head_dim, TILE_ROWS] each."""
        spec = self.spec
        if layer.bias is not None:
            qkv.add_(layer.bias)
        kv_rows = spec.n_kv_heads * spec.head_dim
        q, k, v = torch.split(qkv, [spec.n_heads * spec.head_dim, kv_rows, kv_rows])
        if layer.norms.q_norm is not None and layer.norms.k_norm is not None:
            q, k = rms_norm_features(q, layer.norms.q_norm, spec.rms_eps), rms_norm_features(k, layer.norms.k_norm, spec.rms_eps)
        return [q, k, v]

    def _network(self, layer: _Layer, tiles: list[Tensor], n_rows: int) -> None:
        normed = self._normed(tiles, layer.norms.ffn_norm)
        out = layer.network(normed) if layer.experts is None else layer.experts(normed, n_rows)
        self._add(tiles, out, layer.norms.post_ffn_norm)

    def _normed(self, tiles: list[Tensor], norm: Tensor | None) -> list[Tensor]:
        """tiles: [TILE_ROWS, hidden] each -> features first."""
        return [x.t() if norm is None else rms_norm(x, norm, self.spec.rms_eps).t() for x in tiles]

    def _add(self, tiles: list[Tensor], changes: list[Tensor], norm: Tensor | None) -> None:
        """tiles: [TILE_ROWS, hidden] each, changed in place; changes: [hidden, TILE_ROWS] each."""
        for x, change in zip(tiles, changes, strict=True):
            x.add_(change.t() if norm is None else rms_norm(change.t(), norm, self.spec.rms_eps))

    def _logits(self, x: Tensor, rows: NDArray[np.int32]) -> Tensor:
        if not len(rows):
            return x.new_empty(0, self.spec.vocab_size)
        wanted = x[torch.from_numpy(_padded(rows).astype(np.int64))]
        normed = self._normed(list(torch.split(wanted, TILE_ROWS)), self._final_norm)
        logits = torch.cat([logits.t() for logits in self._head(normed)])[: len(rows)]
        return soft_cap(logits, self.spec.final_softcap) if self.spec.final_softcap else logits


def _padded(values: NDArray[np.int32]) -> NDArray[np.int32]:
    """[n] -> the next multiple of TILE_ROWS, the last value repeated."""
    return np.pad(values, (0, -len(values) % TILE_ROWS), mode="edge")
