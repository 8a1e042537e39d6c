"""What a model is, in numbers: enough to plan memory, to check weights by name and shape, and to compute.

Made of a config.json by `relay.model.hf_spec` or of GGUF metadata by `relay.model.gguf_spec`. No torch: the root process plans KV memory
from it. An architecture is one row of `ARCHITECTURES`; whatever a row does not cover is refused by name, since a model computed almost
rightly looks like one that works.
"""

from typing import Final, Literal

import msgspec

from relay.errors import ModelError
from relay.model.rope_spec import RopeSpec


class Architecture(msgspec.Struct, frozen=True, kw_only=True):
    """How one family differs from the plain pre-norm decoder with rotary embeddings, grouped queries and a gated SiLU network.

    hf: `model_type` of its config.json. gguf: `general.architecture` of its GGUF files, in which
    interleaved_qk: rows of q and k lie so that rope pairs (2i, 2i+1); ours pairs (i, i + head_dim/2), so they are put back.
    qkv_bias: q, k and v have one. qk_norm: RMS norm of q and k before rope, over each head or over all heads at once.
    pre_norms, post_norms: norms at the inputs of attention and network, and at their outputs.
    one_plus: safetensors files hold w of norms that multiply by 1 + w (GGUF files hold 1 + w).
    activation: of the network's gate. scaled_embedding: embeddings are multiplied by sqrt(hidden).
    capped: attention scores and logits may have soft caps. fused: q, k and v are one tensor in the file; gate and up as well.
    experts: how safetensors files name them; empty where there are none.
    windows: which layers see only the last `sliding_window` tokens: none (the key is refused), every, those from `max_window_layers` on,
    or all but the last of each period. states: keys that a config.json must have, since families differ in what they take for granted.
    tied: what is meant by a config.json without `tie_word_embeddings`. old_theta: the same of `rope_theta`.
    """

    hf: str
    gguf: str
    interleaved_qk: bool = False
    qkv_bias: bool = False
    qk_norm: Literal["none", "head", "width"] = "none"
    pre_norms: bool = True
    post_norms: bool = False
    one_plus: bool = False
    activation: Literal["silu", "gelu_tanh"] = "silu"
    scaled_embedding: bool = False
    capped: bool = False
    fused: bool = False
    experts: Literal["", "mixtral", "qwen"] = ""
    windows: Literal["none", "every", "upper", "periodic"] = "none"
    period: int = 0
    states: tuple[str, ...] = ()
    tied: bool = False
    old_theta: float | None = None


def _gemma(generation: int, *, period: int, qk_norm: Literal["none", "head"]) -> Architecture:
    return Architecture(
        hf="gemma2" if generation == 2 else "gemma3_text",
        gguf=f"gemma{generation}",
        qk_norm=qk_norm,
        post_norms=True,
        one_plus=True,
        activation="gelu_tanh",
        scaled_embedding=True,
        capped=True,
        windows="periodic",
        period=period,
        states=("head_dim", "query_pre_attn_scalar"),
        tied=True,
    )


ARCHITECTURES: Final[dict[str, Architecture]] = {
    "llama": Architecture(hf="llama", gguf="llama", interleaved_qk=True, old_theta=10000.0),  # Llama 1 to 3.3, SmolLM, TinyLlama
    "mistral": Architecture(hf="mistral", gguf="llama", interleaved_qk=True, windows="every"),
    "mixtral": Architecture(hf="mixtral", gguf="llama", interleaved_qk=True, windows="every", experts="mixtral"),
    "qwen2": Architecture(hf="qwen2", gguf="qwen2", qkv_bias=True, windows="upper"),  # Qwen 2 and 2.5
    "qwen3": Architecture(hf="qwen3", gguf="qwen3", qk_norm="head", windows="upper", states=("head_dim",)),
    "qwen3_moe": Architecture(
        hf="qwen3_moe", gguf="qwen3moe", qk_norm="head", windows="every", experts="qwen", states=("head_dim", "norm_topk_prob")
    ),
    "gemma2": _gemma(2, period=2, qk_norm="none"),
    "gemma3": _gemma(3, period=6, qk_norm="head"),
    "olmo2": Architecture(hf="olmo2", gguf="olmo2", qk_norm="width", pre_norms=False, post_norms=True),
    "phi3": Architecture(hf="phi3", gguf="phi3", fused=True, windows="every"),  # Phi 3, 3.5 mini and medium; Phi 4
}


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Shapes and constants of one model; `max_context` in tokens.

    ffn: inner width of the gated network, or of each expert. tied_embeddings: the output matrix is the embedding matrix.
    attn_scale: what q k is multiplied by. windows: for each layer, how many tokens it sees, the own one included; 0 is all.
    local_rope: angles of the layers with a window, where they differ. attn_softcap, final_softcap: x becomes cap tanh(x / cap); 0 is none.
    n_experts: networks a layer chooses from, 0 where it has one; n_used of them for each token, weighted by their router's softmax over
    all experts, or over the chosen ones (renormalized).
    """

    architecture: str
    n_layers: int
    hidden: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn: int
    vocab_size: int
    rope: RopeSpec
    rms_eps: float
    max_context: int
    tied_embeddings: bool
    attn_scale: float
    windows: tuple[int, ...]
    local_rope: RopeSpec | None = None
    attn_softcap: float = 0.0
    final_softcap: float = 0.0
    n_experts: int = 0
    n_used: int = 0
    renormalized: bool = True

    @property
    def traits(self) -> Architecture:
        return ARCHITECTURES[self.architecture]

    @property
    def group(self) -> int:
        """Query heads that share one K/V head."""
        return self.n_heads // self.n_kv_heads

    @property
    def distinct_windows(self) -> tuple[int, ...]:
        """Each window that a layer has, once."""
        return tuple(dict.fromkeys(self.windows))


def checked(spec: ModelSpec) -> ModelSpec:
    """The spec itself. Raises ModelError for numbers that fit no model."""
    if spec.n_heads % spec.n_kv_heads:
        raise ModelError(f"{spec.n_heads} query heads cannot share {spec.n_kv_heads} K/V heads evenly; the file is damaged or not a model")
    if spec.head_dim % 2:
        raise ModelError(f"heads of width {spec.head_dim} have no rotary pairs; expected an even width")
    if min(rope.theta for rope in (spec.rope, spec.local_rope or spec.rope)) <= 1:
        raise ModelError(f"the base of rope is {spec.rope.theta}; expected more than 1")
    if spec.n_used > spec.n_experts:
        raise ModelError(f"{spec.n_used} of {spec.n_experts} experts cannot be chosen; the file is damaged or not a model")
    return spec


def served_names(kind: Literal["hf", "gguf"]) -> str:
    """For errors: what files of a kind may call their architecture."""
    return ", ".join(dict.fromkeys(getattr(row, kind) for row in ARCHITECTURES.values()))
