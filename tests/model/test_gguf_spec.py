"""Specs from GGUF metadata, and refusals that name what is not served."""

from typing import Any, cast

import pytest

from relay.errors import ModelError
from relay.model.gguf_metadata import GGUFHeader, TensorInfo
from relay.model.gguf_spec import spec_from_gguf
from relay.model.rope_spec import Divisors, Linear, RopeSpec, Yarn

METADATA = {
    "general.architecture": "llama",
    "llama.block_count": 30,
    "llama.context_length": 8192,
    "llama.embedding_length": 576,
    "llama.feed_forward_length": 1536,
    "llama.attention.head_count": 9,
    "llama.attention.head_count_kv": 3,
    "llama.rope.freq_base": 100000.0,
    "llama.rope.dimension_count": 64,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}


def header(*tensors: str, architecture: str = "llama", **changes: Any) -> GGUFHeader:
    """Changes of keys with `__` for a dot; None takes a key away."""
    metadata = {**METADATA, **{key.replace("__", "."): value for key, value in changes.items()}}
    renamed = {key.replace("llama.", f"{architecture}."): value for key, value in metadata.items() if value is not None}
    if renamed.get("general.architecture") == "llama":
        renamed["general.architecture"] = architecture
    infos = {name: TensorInfo(name=name, shape=(49152, 576), type="F32", offset=0, n_bytes=0) for name in ("token_embd.weight", *tensors)}
    return GGUFHeader(version=3, metadata=renamed, tensors=infos, alignment=32, data_offset=0)


def test_a_llama_is_read() -> None:
    spec = spec_from_gguf(header())
    assert (spec.n_layers, spec.hidden, spec.n_heads, spec.n_kv_heads, spec.head_dim, spec.ffn) == (30, 576, 9, 3, 64, 1536)
    assert (spec.vocab_size, spec.rope, spec.rms_eps, spec.max_context) == (49152, RopeSpec(theta=100000.0), 1e-5, 8192)
    assert (spec.windows, spec.attn_scale, spec.n_experts) == ((0,) * 30, 0.125, 0)
    assert spec.tied_embeddings
    assert spec.traits.interleaved_qk
    assert spec.group == 3


def test_what_older_files_leave_out_has_the_value_of_its_time() -> None:
    spec = spec_from_gguf(header("output.weight", llama__attention__head_count_kv=None, llama__rope__freq_base=None))
    assert (spec.n_kv_heads, spec.rope.theta, spec.tied_embeddings) == (9, 10000.0, False)


def test_a_llama_with_experts_is_a_mixtral() -> None:
    spec = spec_from_gguf(header(llama__expert_count=8, llama__expert_used_count=2))
    assert (spec.architecture, spec.n_experts, spec.n_used, spec.renormalized) == ("mixtral", 8, 2, True)


@pytest.mark.parametrize(("n_layers", "width"), [(26, 64), (46, 576 / 9 + 0), (42, 32)])
def test_gemma_2_alternates_windows_and_has_its_own_scale_at_27b(n_layers: int, width: float) -> None:
    """What the format leaves to its readers."""
    key_length = 32 if width == 32 else None
    more: dict[str, Any] = {
        "llama__attention__key_length": key_length,
        "llama__rope__dimension_count": None,
        "llama__attn_logit_softcapping": 50.0,
    }
    spec = spec_from_gguf(header(architecture="gemma2", llama__block_count=n_layers, **more))
    assert spec.windows == (4096, 0) * (n_layers // 2)
    assert (spec.attn_scale, spec.attn_softcap, spec.final_softcap, spec.local_rope) == (width**-0.5, 50.0, 0.0, None)


def test_gemma_3_looks_far_in_every_sixth_layer_with_other_angles() -> None:
    more: dict[str, Any] = {
        "llama__attention__sliding_window": 512,
        "llama__rope__scaling__type": "linear",
        "llama__rope__scaling__factor": 8.0,
    }
    spec = spec_from_gguf(header(architecture="gemma3", llama__block_count=13, **more))
    assert spec.windows == (512, 512, 512, 512, 512, 0) * 2 + (512,)
    assert spec.local_rope == RopeSpec(theta=10000.0)
    assert spec.rope == RopeSpec(theta=100000.0, scaling=Linear(8.0))


def test_divisors_of_a_tensor_and_yarn_are_read() -> None:
    """llama.cpp#8676: the factors of Llama 3.1's rope are a tensor, which must not be passed over."""
    values = tuple(float(i + 1) for i in range(32))
    assert spec_from_gguf(header("rope_freqs.weight"), lambda: values).rope.scaling == Divisors(values)
    with pytest.raises(ModelError, match="16 divisors; expected 32"):
        spec_from_gguf(header("rope_freqs.weight"), lambda: values[:16])
    more: dict[str, Any] = {
        "llama__rope__scaling__type": "yarn",
        "llama__rope__scaling__factor": 4.0,
        "llama__rope__scaling__original_context_length": 2048,
    }
    yarn = spec_from_gguf(header(**more)).rope.scaling
    assert isinstance(yarn, Yarn)
    assert (yarn.factor, yarn.original, yarn.beta_fast, yarn.beta_slow) == (4.0, 2048, 32.0, 1.0)
    assert yarn.magnitude == pytest.approx(1.138629436)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("general.architecture", "mamba"),
        ("general.architecture", None),
        ("llama.block_count", None),
        ("llama.block_count", 0),
        ("llama.block_count", True),
        ("llama.embedding_length", "576"),
        ("llama.attention.head_count", [9, 9]),
        ("llama.attention.layer_norm_rms_epsilon", None),
        ("llama.attention.layer_norm_rms_epsilon", float("nan")),
        ("llama.rope.freq_base", -1.0),
        ("llama.rope.freq_base", float("inf")),
        ("llama.rope.dimension_count", 32),
        ("llama.rope.scaling.type", "longrope"),
        ("llama.expert_count", -1),
        ("llama.attention.value_length", 128),
        ("llama.attention.sliding_window", "4096"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(ModelError, match=key.removeprefix("general.")):
        spec_from_gguf(header(**{key.replace(".", "__"): cast(Any, value)}))


def test_an_architecture_without_windows_or_experts_refuses_them() -> None:
    for key in ("attention.sliding_window", "expert_count"):
        with pytest.raises(ModelError, match=rf"`qwen2\.{key}` is 8"):
            spec_from_gguf(header(architecture="qwen2", **{"llama__" + key.replace(".", "__"): cast(Any, 8)}))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"llama__attention__head_count_kv": 2}, "share"),
        ({"llama__embedding_length": 63, "llama__rope__dimension_count": None}, "width 7"),
        ({"llama__expert_count": 4, "llama__expert_used_count": 5}, "5 of 4 experts"),
        ({"llama__embedding_length": 5, "llama__rope__dimension_count": None}, "key_length"),
    ],
)
def test_shapes_that_fit_no_model_are_refused(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ModelError, match=match):
        spec_from_gguf(header(**changes))


def test_a_file_without_embeddings_is_refused() -> None:
    whole = header()
    with pytest.raises(ModelError, match="token_embd"):
        spec_from_gguf(GGUFHeader(version=3, metadata=whole.metadata, tensors={}, alignment=32, data_offset=0))
