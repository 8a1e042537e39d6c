"""Specs from config.json files as transformers 4 and 5 write them, and refusals that name what is not served."""

from typing import Any

import pytest

from relay.errors import ModelError
from relay.model.hf_spec import spec_from_hf
from relay.model.rope_spec import Linear, Llama3, RopeSpec
from tests.model import tiny

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


def config(name: str = "llama", **changes: Any) -> dict[str, Any]:
    return {**tiny.config_of(name), **changes}


def old(name: str = "llama", **changes: Any) -> dict[str, Any]:
    """As transformers 4 writes it."""
    return {**config(name), "rope_parameters": None, "rope_theta": 10000.0, "layer_types": None, **changes}


def test_a_llama_is_read() -> None:
    spec = spec_from_hf(config())
    assert (spec.architecture, spec.n_layers, spec.hidden, spec.n_heads, spec.n_kv_heads, spec.head_dim) == ("llama", 2, 64, 4, 2, 64)
    assert (spec.ffn, spec.vocab_size, spec.max_context, spec.rms_eps, spec.tied_embeddings) == (96, 256, 1024, 1e-6, True)
    assert (spec.windows, spec.rope, spec.local_rope, spec.attn_scale) == ((0, 0), RopeSpec(theta=10000.0), None, 0.125)


@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_either_key_of_the_rope_type_is_honoured(key: str) -> None:
    """mlxcel#1355: configs have one or the other, and short prompts hide it when the scaling is passed over."""
    scaling = {key: "llama3", **{name: value for name, value in LLAMA3.items() if name != "rope_type"}}
    right = RopeSpec(theta=10000.0, scaling=Llama3(factor=8.0, low=1.0, high=4.0, original=64))
    assert spec_from_hf(old(rope_scaling=scaling)).rope == right
    assert spec_from_hf(config(rope_parameters={"rope_theta": 10000.0, **scaling})).rope == right


def test_a_rope_type_that_is_unknown_or_contradicts_itself_is_refused() -> None:
    """mlxcel#1355."""
    for kind in ("longrope", "su", "dynamic", "mrope", "new"):
        with pytest.raises(ModelError, match=f"the rope type '{kind}' is not served; expected default, linear, llama3 or yarn"):
            spec_from_hf(old(rope_scaling={"type": kind, "factor": 2.0}))
    with pytest.raises(ModelError, match="`rope_type` is 'linear' and `type` is 'yarn'"):
        spec_from_hf(old(rope_scaling={"rope_type": "linear", "type": "yarn", "factor": 2.0}))
    assert spec_from_hf(old(rope_scaling={"rope_type": "default", "type": "default"})).rope == RopeSpec(theta=10000.0)


def test_gemma_3_has_two_ropes_in_either_form() -> None:
    five = spec_from_hf(config("gemma3"))
    four = spec_from_hf(old("gemma3", rope_theta=1000000.0, rope_local_base_freq=10000.0, _sliding_window_pattern=None))
    assert five == four
    assert (five.rope.theta, five.local_rope, five.windows) == (1000000.0, RopeSpec(theta=10000.0), (24, 24))
    scaled = old("gemma3", rope_theta=1e6, rope_scaling={"rope_type": "linear", "factor": 8.0}, num_hidden_layers=12)
    spec = spec_from_hf(scaled)
    assert (spec.rope.scaling, spec.local_rope) == (Linear(8.0), RopeSpec(theta=10000.0))
    assert spec.windows == (24, 24, 24, 24, 24, 0) * 2
    assert spec_from_hf({**scaled, "sliding_window_pattern": 3, "_sliding_window_pattern": None}).windows == (24, 24, 0) * 4


def test_windows_follow_the_rules_of_each_family() -> None:
    assert spec_from_hf(config("mistral_sliding")).windows == (24, 24)
    assert spec_from_hf(config("mistral_sliding", sliding_window=None)).windows == (0, 0)
    assert spec_from_hf(old("gemma2", num_hidden_layers=4)).windows == (24, 0, 24, 0)
    qwen = old("qwen2", num_hidden_layers=4, use_sliding_window=True, sliding_window=20, max_window_layers=3)
    assert spec_from_hf(qwen).windows == (0, 0, 0, 20)
    assert spec_from_hf({**qwen, "use_sliding_window": False}).windows == (0, 0, 0, 0)
    with pytest.raises(ModelError, match="`layer_types`"):
        spec_from_hf(config("qwen2", layer_types=["full_attention", "linear_attention"]))
    with pytest.raises(ModelError, match="contradicts itself"):
        spec_from_hf(config("qwen2", layer_types=["full_attention", "sliding_attention"]))


def test_yarn_widens_the_context() -> None:
    """Qwen's documentation has users add `rope_scaling`, and leave `max_position_embeddings` as it is."""
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    assert spec_from_hf(old("qwen2", rope_scaling=scaling)).max_context == 4096
    with pytest.raises(ModelError, match="`mscale`"):
        spec_from_hf(old("qwen2", rope_scaling={**scaling, "mscale": 0.7}))


def test_what_families_take_for_granted_where_a_config_is_silent() -> None:
    silent = {"tie_word_embeddings": None}
    assert [spec_from_hf(config(name, **silent)).tied_embeddings for name in ("llama", "qwen2", "gemma2", "gemma3")] == [
        False,
        False,
        True,
        True,
    ]
    assert spec_from_hf(old(rope_theta=None)).rope.theta == 10000.0
    for name, key in (("mistral_sliding", "rope_theta"), ("gemma3", "head_dim"), ("qwen3", "head_dim"), ("qwen3_moe", "norm_topk_prob")):
        with pytest.raises(ModelError, match=f"`{key}`"):
            spec_from_hf(old(name, **{key: None}))


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("llama", "model_type", "gpt2"),
        ("llama", "model_type", None),
        ("llama", "model_type", "gemma3"),
        ("llama", "quantization_config", {"quant_method": "fp8"}),
        ("llama", "hidden_act", "gelu"),
        ("gemma2", "hidden_activation", "gelu"),
        ("llama", "attention_bias", True),
        ("llama", "mlp_bias", True),
        ("llama", "rope_interleaved", True),
        ("llama", "sliding_window", 512),
        ("llama", "final_logit_softcapping", 30.0),
        ("llama", "num_hidden_layers", "2"),
        ("llama", "num_hidden_layers", True),
        ("llama", "hidden_size", 10**400),
        ("llama", "num_hidden_layers", 10**6),
        ("mixtral", "num_local_experts", 10**6),
        ("llama", "rms_norm_eps", 0),
        ("llama", "rms_norm_eps", 1e300),
        ("llama", "rope_parameters", "default"),
        ("llama", "tie_word_embeddings", 1),
        ("phi3", "partial_rotary_factor", 0.75),
        ("qwen3_moe", "mlp_only_layers", [0]),
        ("qwen3_moe", "decoder_sparse_step", 2),
        ("gemma3", "use_bidirectional_attention", True),
        ("gemma2", "attn_logit_softcapping", -1.0),
    ],
)
def test_what_would_be_computed_wrongly_is_refused_by_name(name: str, key: str, value: object) -> None:
    with pytest.raises(ModelError, match=f"`{key}`|model_type"):
        spec_from_hf(config(name, **{key: value}))


def test_numbers_that_no_table_can_be_made_of_are_refused() -> None:
    for theta in (1.0, 0.5):
        with pytest.raises(ModelError, match="base of rope"):
            spec_from_hf(config(rope_parameters={"rope_theta": theta, "rope_type": "yarn", "factor": 2.0}))
    wide = {"rope_theta": 1e4, "rope_type": "yarn", "factor": 1e9, "original_max_position_embeddings": 1 << 30}
    assert spec_from_hf(config(rope_parameters=wide)).max_context == (1 << 31) - 1


def test_partial_rope_within_the_rope_parameters_is_refused() -> None:
    with pytest.raises(ModelError, match=r"`partial_rotary_factor` is 0\.5"):
        spec_from_hf(config("phi3", rope_parameters={"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.5}))
