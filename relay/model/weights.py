"""The weights of a decoder as the transformer uses them, whatever file they came from. All float32.

Matrices that read the same input are one matrix: q, k and v rows in that order; gate and up rows in that order. q and k rows are in the
order of half-split rope.
"""

from dataclasses import dataclass

from torch import Tensor

from relay.model.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """attn_norm, ffn_norm: [hidden]. qkv: [(n_heads + 2 n_kv_heads) head_dim, hidden]. attn_out: [hidden, n_heads head_dim].
    gate_up: [2 ffn, hidden]. down: [hidden, ffn]."""

    attn_norm: Tensor
    qkv: Tensor
    attn_out: Tensor
    ffn_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class Weights:
    """embedding, head: [vocab_size, hidden], one tensor where they are tied. final_norm: [hidden]."""

    spec: ModelSpec
    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: Tensor
