"""What a model is, in numbers: enough to plan memory, to check weights by name and shape, and to compute.

In: the header of a model file. Out: a `ModelSpec`. No torch: the root process plans KV memory from it. An architecture is one row of
`ARCHITECTURES`; whatever a row does not cover is refused by name, since a model computed almost rightly looks like one that works.
"""

from typing import Any, Final

import msgspec

from relay.errors import ModelError
from relay.model.gguf_metadata import GGUFHeader


class Architecture(msgspec.Struct, frozen=True, kw_only=True):
    """How one family differs from the plain pre-norm decoder with rotary embeddings, grouped queries and a gated SiLU network.

    interleaved_qk: GGUF stores rows of q and k so that rope pairs (2i, 2i+1); ours pairs (i, i + head_dim/2), so they are put back.
    """

    interleaved_qk: bool


ARCHITECTURES: Final[dict[str, Architecture]] = {
    "llama": Architecture(interleaved_qk=True),  # Llama 1 and 2, SmolLM, SmolLM2, TinyLlama
}


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Shapes and constants of one model; `ffn` is the inner width of the gated network, `max_context` in tokens.

    `tied_embeddings`: the output matrix is the embedding matrix.
    """

    architecture: str
    n_layers: int
    hidden: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn: int
    vocab_size: int
    rope_theta: float
    rms_eps: float
    max_context: int
    tied_embeddings: bool

    @property
    def traits(self) -> Architecture:
        return ARCHITECTURES[self.architecture]

    @property
    def group(self) -> int:
        """Query heads that share one K/V head."""
        return self.n_heads // self.n_kv_heads


def spec_from_gguf(header: GGUFHeader) -> ModelSpec:
    """Read a spec from GGUF metadata. Raises ModelError that names the key, what it says and what is served."""
    architecture = header.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ModelError(f"the architecture `{architecture}` is not served; expected one of: {', '.join(ARCHITECTURES)}")
    keys = _Keys(header.metadata, architecture)
    if "token_embd.weight" not in header.tensors:
        raise ModelError("the tensor `token_embd.weight` is missing: the file holds no complete model; fetch it again")
    hidden, n_heads = keys.count("embedding_length"), keys.count("attention.head_count")
    head_dim = keys.count("attention.key_length", hidden // n_heads)
    spec = ModelSpec(
        architecture=architecture,
        n_layers=keys.count("block_count"),
        hidden=hidden,
        n_heads=n_heads,
        n_kv_heads=keys.count("attention.head_count_kv", n_heads),
        head_dim=head_dim,
        ffn=keys.count("feed_forward_length"),
        vocab_size=header.tensors["token_embd.weight"].shape[0],
        rope_theta=keys.positive("rope.freq_base", 10000.0),
        rms_eps=keys.positive("attention.layer_norm_rms_epsilon"),
        max_context=keys.count("context_length"),
        tied_embeddings="output.weight" not in header.tensors,
    )
    keys.expect("attention.value_length", head_dim, "K and V heads of one width are served")
    keys.expect("rope.dimension_count", head_dim, "rope over the whole head is served")
    keys.expect("rope.scaling.type", "none", "unscaled rope is served")
    keys.expect("expert_count", 0, "models without experts are served")
    keys.expect("attention.sliding_window", 0, "attention to the whole context is served")
    if spec.n_heads % spec.n_kv_heads:
        raise ModelError(f"{n_heads} query heads cannot share {spec.n_kv_heads} K/V heads evenly; the file is damaged or not a model")
    if head_dim % 2:
        raise ModelError(f"heads of width {head_dim} have no rotary pairs; expected an even width")
    return spec


class _Keys:
    """Metadata of one architecture; every error names the full key."""

    def __init__(self, metadata: dict[str, Any], architecture: str) -> None:
        self._metadata = metadata
        self._prefix = architecture

    def count(self, name: str, default: int | None = None) -> int:
        value = self._metadata.get(f"{self._prefix}.{name}", default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelError(f"`{self._prefix}.{name}` is {value!r}; expected a whole number of 1 or more")
        return value

    def positive(self, name: str, default: float | None = None) -> float:
        value = self._metadata.get(f"{self._prefix}.{name}", default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
            raise ModelError(f"`{self._prefix}.{name}` is {value!r}; expected a number above 0")
        return float(value)

    def expect(self, name: str, served: object, why: str) -> None:
        """Refuse a key that says something that would be computed wrongly; an absent key says what is served."""
        value = self._metadata.get(f"{self._prefix}.{name}", served)
        if value != served:
            raise ModelError(f"`{self._prefix}.{name}` is {value!r} and {why} ({served!r}); use another model")
