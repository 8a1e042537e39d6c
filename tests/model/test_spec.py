"""Specs from GGUF metadata, and refusals that name what is not served."""

from typing import Any

import pytest

from relay.errors import ModelError
from relay.model.gguf_metadata import GGUFHeader, TensorInfo
from relay.model.spec import spec_from_gguf

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


def header(*tensors: str, **changes: Any) -> GGUFHeader:
    metadata = {**METADATA, **{key.replace("__", "."): value for key, value in changes.items()}}
    metadata = {key: value for key, value in metadata.items() if value is not None}
    infos = {name: TensorInfo(name=name, shape=(49152, 576), type="F32", offset=0, n_bytes=0) for name in ("token_embd.weight", *tensors)}
    return GGUFHeader(version=3, metadata=metadata, tensors=infos, alignment=32, data_offset=0)


def test_a_llama_is_read() -> None:
    spec = spec_from_gguf(header())
    assert (spec.n_layers, spec.hidden, spec.n_heads, spec.n_kv_heads, spec.head_dim, spec.ffn) == (30, 576, 9, 3, 64, 1536)
    assert (spec.vocab_size, spec.rope_theta, spec.rms_eps, spec.max_context) == (49152, 100000.0, 1e-5, 8192)
    assert spec.tied_embeddings
    assert spec.traits.interleaved_qk
    assert spec.group == 3


def test_what_older_files_leave_out_has_the_value_of_its_time() -> None:
    spec = spec_from_gguf(header("output.weight", llama__attention__head_count_kv=None, llama__rope__freq_base=None))
    assert (spec.n_kv_heads, spec.rope_theta, spec.tied_embeddings) == (9, 10000.0, False)


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
        ("llama.rope.freq_base", -1.0),
        ("llama.rope.dimension_count", 32),
        ("llama.rope.scaling.type", "yarn"),
        ("llama.expert_count", 8),
        ("llama.attention.value_length", 128),
        ("llama.attention.sliding_window", 4096),
    ],
)
def test_what_would_be_computed_wrongly_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(ModelError, match=key.removeprefix("general.")):
        spec_from_gguf(header(**{key.replace(".", "__"): value}))


@pytest.mark.parametrize(
    ("changes", "match"),
    [({"llama__attention__head_count_kv": 2}, "share"), ({"llama__embedding_length": 63, "llama__rope__dimension_count": None}, "width 7")],
)
def test_shapes_that_fit_no_model_are_refused(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ModelError, match=match):
        spec_from_gguf(header(**changes))


def test_a_file_without_embeddings_is_refused() -> None:
    whole = header()
    with pytest.raises(ModelError, match="token_embd"):
        spec_from_gguf(GGUFHeader(version=3, metadata=whole.metadata, tensors={}, alignment=32, data_offset=0))
