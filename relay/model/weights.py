"""The weights of a decoder as the reference computes with them, whatever file they came from. All float32.

Matrices that read the same input are one matrix: q, k and v rows in that order; gate and up rows in that order. q and k rows are in the
order of half-split rope. `unpack` makes them of a checkpoint, each number once: what it needs beside the result is one chunk of a matrix.
The packed originals stay where they are, in the checkpoint, for kernels that compute with those.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from relay.model.checkpoint import Checkpoint
from relay.model.dequantize import dequantize
from relay.model.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class NetworkWeights:
    """A gated network. gate_up: [2 ffn, hidden]. down: [hidden, ffn]."""

    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """qkv: [(n_heads + 2 n_kv_heads) head_dim, hidden], and its bias. attn_out: [hidden, n_heads head_dim].

    q_norm, k_norm: [head_dim], or [n_heads head_dim] and [n_kv_heads head_dim]. The other norms: [hidden]. networks: one, or as many as the
    router, [n_experts, hidden], chooses from. None: the architecture has no such thing.
    """

    qkv: Tensor
    attn_out: Tensor
    networks: tuple[NetworkWeights, ...]
    attn_norm: Tensor | None = None
    qkv_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    post_attn_norm: Tensor | None = None
    ffn_norm: Tensor | None = None
    router: Tensor | None = None
    post_ffn_norm: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Weights:
    """embedding, head: [vocab_size, hidden], one tensor where they are tied. final_norm: [hidden]."""

    spec: ModelSpec
    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: Tensor


def unpack(checkpoint: Checkpoint) -> Weights:
    """All of a model in float32."""
    spec, reader = checkpoint.spec, _Reader(checkpoint)
    embedding = reader.matrix("embedding")
    return Weights(
        spec=spec,
        embedding=embedding,
        layers=tuple(_layer(reader, spec, f"layers.{i}.") for i in range(spec.n_layers)),
        final_norm=reader.vector("final_norm"),
        head=embedding if spec.tied_embeddings else reader.matrix("head"),
    )


def _layer(reader: "_Reader", spec: ModelSpec, prefix: str) -> LayerWeights:
    networks = [f"{prefix}experts.{e}." for e in range(spec.n_experts)] or [prefix]
    return LayerWeights(
        qkv=reader.matrix(*(prefix + part for part in "qkv")),
        attn_out=reader.matrix(f"{prefix}attn_out"),
        networks=tuple(NetworkWeights(reader.matrix(f"{name}gate", f"{name}up"), reader.matrix(f"{name}down")) for name in networks),
        attn_norm=reader.optional(f"{prefix}attn_norm"),
        qkv_bias=torch.cat([reader.vector(f"{prefix}{part}_bias") for part in "qkv"]) if spec.traits.qkv_bias else None,
        q_norm=reader.optional(f"{prefix}q_norm"),
        k_norm=reader.optional(f"{prefix}k_norm"),
        post_attn_norm=reader.optional(f"{prefix}post_attn_norm"),
        ffn_norm=reader.optional(f"{prefix}ffn_norm"),
        router=reader.matrix(f"{prefix}router") if spec.n_experts else None,
        post_ffn_norm=reader.optional(f"{prefix}post_ffn_norm"),
    )


class _Reader:
    """Slots of a checkpoint as float32 tensors."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._names = frozenset(checkpoint.names)

    def matrix(self, *names: str) -> Tensor:
        """One, or several on top of each other."""
        shapes = [self._checkpoint.shape(name) for name in names]
        out = torch.empty(sum(n_out for n_out, _ in shapes), shapes[0][1])
        for name, part in zip(names, torch.split(out, [n_out for n_out, _ in shapes]), strict=True):
            dequantize(self._checkpoint.matrix(name), part)
        return out

    def vector(self, name: str) -> Tensor:
        return torch.from_numpy(self._checkpoint.vector(name))

    def optional(self, name: str) -> Tensor | None:
        return self.vector(name) if name in self._names else None
