"""Where a slot lies in a file: the name and shape of a tensor, and the first of its rows that are the slot's.

Quantized blocks run along rows, so rows can be taken out of any tensor without unpacking it: that is how q, k and v come out of one fused
matrix, and an expert out of a stack of them. Names: transformers' modelling files, and llama.cpp's gguf-py/gguf/constants.py.
"""

from typing import Final

import msgspec

from relay.model.slots import Slot
from relay.model.spec import ModelSpec


class Place(msgspec.Struct, frozen=True):
    """shape: that of the whole tensor. first_row: counted over all its dimensions but the last."""

    tensor: str
    shape: tuple[int, ...]
    first_row: int = 0


_HF: Final = {"embedding": "model.embed_tokens.weight", "final_norm": "model.norm.weight", "head": "lm_head.weight"}
_HF_LAYER: Final = {
    "attn_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "qkv": "self_attn.qkv_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "attn_out": "self_attn.o_proj.weight",
    "post_attn_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "gate_up": "mlp.gate_up_proj.weight",
    "down": "mlp.down_proj.weight",
    "post_ffn_norm": "post_feedforward_layernorm.weight",
}
_HF_ROUTER: Final = {"mixtral": "block_sparse_moe.gate.weight", "qwen": "mlp.gate.weight"}
_HF_EXPERT: Final = {
    "mixtral": ("block_sparse_moe.experts", {"gate": "w1", "up": "w3", "down": "w2"}),
    "qwen": ("mlp.experts", {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}),
}
_GGUF: Final = {"embedding": "token_embd.weight", "final_norm": "output_norm.weight", "head": "output.weight"}
_GGUF_LAYER: Final = {
    "attn_norm": "attn_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "qkv": "attn_qkv.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "attn_out": "attn_output.weight",
    "post_attn_norm": "post_attention_norm.weight",
    "ffn_norm": "ffn_norm.weight",
    "router": "ffn_gate_inp.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "gate_up": "ffn_up.weight",
    "down": "ffn_down.weight",
    "post_ffn_norm": "post_ffw_norm.weight",
}


def hf_place(spec: ModelSpec, slot: Slot) -> Place:
    """In safetensors of the Hugging Face layout."""
    if slot.layer is None:
        return Place(_HF[slot.name], slot.shape)
    prefix, experts = f"model.layers.{slot.layer}", spec.traits.experts
    match slot.part.split("."):
        case ["experts", number, part] if experts:
            folder, names = _HF_EXPERT[experts]
            return Place(f"{prefix}.{folder}.{number}.{names[part]}.weight", slot.shape)
        case ["router"] if experts:
            return Place(f"{prefix}.{_HF_ROUTER[experts]}", slot.shape)
        case ["ffn_norm"]:
            before = "pre_feedforward_layernorm" if spec.traits.post_norms else "post_attention_layernorm"
            return Place(f"{prefix}.{before}.weight", slot.shape)
    part, shape, first_row = _whole(spec, slot)
    return Place(f"{prefix}.{_HF_LAYER[part]}", shape, first_row)


def gguf_place(spec: ModelSpec, slot: Slot) -> Place:
    """In a GGUF file, which stacks experts."""
    if slot.layer is None:
        return Place(_GGUF[slot.name], slot.shape)
    prefix = f"blk.{slot.layer}"
    match slot.part.split("."):
        case ["experts", number, part]:
            n_rows, n_in = slot.shape
            return Place(f"{prefix}.ffn_{part}_exps.weight", (spec.n_experts, n_rows, n_in), int(number) * n_rows)
    part, shape, first_row = _whole(spec, slot)
    return Place(f"{prefix}.{_GGUF_LAYER[part]}", shape, first_row)


def _whole(spec: ModelSpec, slot: Slot) -> tuple[str, tuple[int, ...], int]:
    """The tensor of a layer that a slot is part of: itself, or where the architecture fuses, q k v or gate up in this order."""
    q, kv = spec.n_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim
    fused = {
        "q": ("qkv", q + 2 * kv, 0),
        "k": ("qkv", q + 2 * kv, q),
        "v": ("qkv", q + 2 * kv, q + kv),
        "gate": ("gate_up", 2 * spec.ffn, 0),
        "up": ("gate_up", 2 * spec.ffn, spec.ffn),
    }
    if not spec.traits.fused or slot.part not in fused:
        return slot.part, slot.shape, 0
    part, n_rows, first_row = fused[slot.part]
    return part, (n_rows, *slot.shape[1:]), first_row
