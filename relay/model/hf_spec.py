"""A `ModelSpec` out of a config.json in the Hugging Face layout, as transformers 4 and 5 write them.

Keys that would be computed wrongly are refused by name. Version 5 holds all of rope in `rope_parameters`, with one entry per type of layer
where they differ; version 4 has `rope_theta`, `rope_scaling` and, for Gemma 3, `rope_local_base_freq`.
"""

from collections.abc import Mapping
from typing import Any

from relay.errors import ModelError
from relay.model.keys import MOST, MOST_EXPERTS, MOST_LAYERS, Keys
from relay.model.rope_spec import Linear, Llama3, RopeSpec, Yarn, yarn_magnitude
from relay.model.spec import ARCHITECTURES, Architecture, ModelSpec, checked, served_names


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """Read a spec. Raises ModelError that names the key, what it says and what is served."""
    keys = Keys(config)
    kind = keys.get("model_type")
    name = next((name for name, row in ARCHITECTURES.items() if row.hf == kind), None)
    if name is None:
        raise ModelError(f"the architecture `{kind}` is not served; expected `model_type` to be one of: {served_names('hf')}")
    row = ARCHITECTURES[name]
    for key in row.states:
        if keys.get(key) is None:
            raise ModelError(f"`{key}` is missing; a config.json of `{kind}` has it: fetch the model again")
    hidden, n_heads = keys.count("hidden_size"), keys.count("num_attention_heads")
    n_layers = keys.count("num_hidden_layers", most=MOST_LAYERS)
    head_dim = keys.count("head_dim", hidden // n_heads or None)
    _refuse_unserved(keys, row)
    rope, local_rope = _ropes(keys, row)
    max_context = keys.count("max_position_embeddings")
    if isinstance(rope.scaling, Yarn):
        max_context = max(max_context, min(int(rope.scaling.factor * rope.scaling.original), MOST))
    return checked(
        ModelSpec(
            architecture=name,
            n_layers=n_layers,
            hidden=hidden,
            n_heads=n_heads,
            n_kv_heads=keys.count("num_key_value_heads", n_heads),
            head_dim=head_dim,
            ffn=keys.count("moe_intermediate_size" if row.experts == "qwen" else "intermediate_size"),
            vocab_size=keys.count("vocab_size"),
            rope=rope,
            rms_eps=keys.positive("rms_norm_eps"),
            max_context=max_context,
            tied_embeddings=keys.flag("tie_word_embeddings", row.tied),
            attn_scale=keys.positive("query_pre_attn_scalar", float(head_dim)) ** -0.5,
            windows=_windows(keys, row, n_layers),
            local_rope=local_rope,
            attn_softcap=keys.limit("attn_logit_softcapping") if row.capped else 0.0,
            final_softcap=keys.limit("final_logit_softcapping") if row.capped else 0.0,
            n_experts=_n_experts(keys, row),
            n_used=keys.count("num_experts_per_tok") if row.experts else 0,
            renormalized=keys.flag("norm_topk_prob", True) if row.experts else True,
        )
    )


def _refuse_unserved(keys: Keys, row: Architecture) -> None:
    if keys.get("quantization_config") is not None:
        how = (keys.mapping("quantization_config") or {}).get("quant_method")
        raise ModelError(f"`quantization_config` says {how!r}; safetensors of F32, F16 or BF16 are served: use those, or a GGUF file")
    if row.activation == "silu":
        keys.expect("hidden_act", "silu", "a network gated by SiLU is served")
    else:
        keys.expect("hidden_activation", "gelu_pytorch_tanh", "a network gated by that activation is served")
    keys.expect("attention_bias", False, "attention without it is served")
    keys.expect("mlp_bias", False, "a network without it is served")
    keys.expect("use_bidirectional_attention", False, "causal attention is served")
    keys.expect("partial_rotary_factor", 1.0, "rope over the whole head is served")
    keys.expect("rope_interleaved", False, "rope of half-split heads is served")
    keys.expect("decoder_sparse_step", 1, "experts in every layer are served")
    keys.expect("mlp_only_layers", [], "experts in every layer are served")
    if not row.capped:
        keys.expect("attn_logit_softcapping", 0, "this architecture is served without caps")
        keys.expect("final_logit_softcapping", 0, "this architecture is served without caps")
        keys.expect("query_pre_attn_scalar", 0, "this architecture is served with the usual scale")


def _n_experts(keys: Keys, row: Architecture) -> int:
    if not row.experts:
        return 0
    return keys.count("num_local_experts" if keys.get("num_experts") is None else "num_experts", most=MOST_EXPERTS)


def _windows(keys: Keys, row: Architecture, n_layers: int) -> tuple[int, ...]:
    """How many tokens each layer sees; 0 is all."""
    size = keys.size("sliding_window")
    if row.hf.startswith("qwen") and not keys.flag("use_sliding_window", False):
        size = 0
    types = keys.get("layer_types")
    if types is not None:
        known = {"full_attention": 0, "sliding_attention": size}
        if not isinstance(types, list) or len(types) != n_layers or not all(kind in known for kind in types):
            raise ModelError(f"`layer_types` is {types!r}; expected {n_layers} of: {', '.join(known)}")
        if "sliding_attention" in types and not size:
            raise ModelError("`layer_types` has sliding_attention, and `sliding_window` gives no width for it: the file contradicts itself")
        return tuple(known[kind] for kind in types)
    match row.windows:
        case "none":
            keys.expect("sliding_window", 0, "this architecture is served with attention to the whole context")
            return (0,) * n_layers
        case "every":
            return (size,) * n_layers
        case "upper":
            first = keys.count("max_window_layers") if size else n_layers
            return tuple(0 if i < first else size for i in range(n_layers))
        case "periodic":
            size = keys.count("sliding_window")
            own = "sliding_window_pattern" if keys.get("_sliding_window_pattern") is None else "_sliding_window_pattern"
            period = keys.count(own, row.period)
            return tuple(0 if (i + 1) % period == 0 else size for i in range(n_layers))


def _ropes(keys: Keys, row: Architecture) -> tuple[RopeSpec, RopeSpec | None]:
    """Those of all layers, and those of layers with a window where they are others."""
    given = keys.mapping("rope_parameters")
    if given is None:
        theta = keys.positive("rope_theta", row.old_theta)
        scaling = keys.mapping("rope_scaling") or {}
        local = RopeSpec(theta=keys.positive("rope_local_base_freq", 10000.0)) if row.hf == "gemma3_text" else None
        return _rope(Keys({"rope_theta": theta, **scaling}), keys), local
    if "full_attention" not in given:
        return _rope(Keys(given), keys), None
    nested = Keys(given)
    local_given = nested.mapping("sliding_attention")
    return _rope(Keys(nested.mapping("full_attention") or {}), keys), _rope(Keys(local_given), keys) if local_given else None


def _rope(keys: Keys, config: Keys) -> RopeSpec:
    theta = keys.positive("rope_theta")
    kind, older = keys.get("rope_type"), keys.get("type")
    if kind is not None and older is not None and kind != older:
        raise ModelError(f"`rope_type` is {kind!r} and `type` is {older!r}; expected one of them, or the same")
    keys.expect("partial_rotary_factor", 1.0, "rope over the whole head is served")
    match kind if kind is not None else older:
        case None | "default":
            return RopeSpec(theta=theta)
        case "linear":
            return RopeSpec(theta=theta, scaling=Linear(keys.positive("factor")))
        case "llama3":
            low, high = keys.positive("low_freq_factor"), keys.positive("high_freq_factor")
            if not low < high:
                raise ModelError(f"`low_freq_factor` is {low} and `high_freq_factor` {high}; expected the first to be less")
            original = keys.count("original_max_position_embeddings")
            return RopeSpec(theta=theta, scaling=Llama3(factor=keys.positive("factor"), low=low, high=high, original=original))
        case "yarn":
            return RopeSpec(theta=theta, scaling=_yarn(keys, config))
    raise ModelError(f"the rope type {kind if kind is not None else older!r} is not served; expected default, linear, llama3 or yarn")


def _yarn(keys: Keys, config: Keys) -> Yarn:
    for name in ("mscale", "mscale_all_dim"):
        if keys.get(name) is not None:
            raise ModelError(f"`{name}` is {keys.get(name)!r}; YaRN is served without it: use another model")
    keys.expect("truncate", True, "YaRN with whole borders of its ramp is served")
    factor = keys.positive("factor")
    original = keys.count("original_max_position_embeddings", config.count("max_position_embeddings"))
    return Yarn(
        factor=factor,
        original=original,
        beta_fast=keys.positive("beta_fast", 32.0),
        beta_slow=keys.positive("beta_slow", 1.0),
        magnitude=keys.positive("attention_factor", yarn_magnitude(factor)),
    )
