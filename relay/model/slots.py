"""The tensors of a model by our own names and shapes, whatever file they lie in.

`embedding`, `final_norm`, `head` (where it is not the embedding), and for layer i, as far as its architecture has them:

    layers.i. attn_norm q k v q_bias k_bias v_bias q_norm k_norm attn_out post_attn_norm ffn_norm gate up down router post_ffn_norm
    layers.i.experts.e. gate up down

Matrices are [n_out, n_in], vectors [n].
"""

from collections.abc import Iterator

import msgspec

from relay.model.spec import ModelSpec


class Slot(msgspec.Struct, frozen=True):
    """shape: of the tensor itself; a file may hold it as some rows of a larger one."""

    name: str
    shape: tuple[int, ...]

    @property
    def layer(self) -> int | None:
        """The number of its layer; None for the three that have none."""
        return int(self.name.split(".")[1]) if "." in self.name else None

    @property
    def part(self) -> str:
        """The name within its layer, such as `q` or `experts.3.gate`."""
        return self.name.split(".", 2)[-1]


def slots(spec: ModelSpec) -> Iterator[Slot]:
    """All of a model, each once."""
    yield Slot("embedding", (spec.vocab_size, spec.hidden))
    for i in range(spec.n_layers):
        for part, shape in _layer(spec):
            yield Slot(f"layers.{i}.{part}", shape)
    yield Slot("final_norm", (spec.hidden,))
    if not spec.tied_embeddings:
        yield Slot("head", (spec.vocab_size, spec.hidden))


def _layer(spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    traits, hidden = spec.traits, spec.hidden
    rows = {"q": spec.n_heads * spec.head_dim, "k": spec.n_kv_heads * spec.head_dim, "v": spec.n_kv_heads * spec.head_dim}
    if traits.pre_norms:
        yield "attn_norm", (hidden,)
    for part, n_rows in rows.items():
        yield part, (n_rows, hidden)
    if traits.qkv_bias:
        for part, n_rows in rows.items():
            yield f"{part}_bias", (n_rows,)
    if traits.qk_norm != "none":
        for part in ("q", "k"):
            yield f"{part}_norm", (spec.head_dim if traits.qk_norm == "head" else rows[part],)
    yield "attn_out", (hidden, rows["q"])
    if traits.post_norms:
        yield "post_attn_norm", (hidden,)
    if traits.pre_norms:
        yield "ffn_norm", (hidden,)
    if traits.experts:
        yield "router", (spec.n_experts, hidden)
    for prefix in [f"experts.{e}." for e in range(spec.n_experts)] or [""]:
        yield f"{prefix}gate", (spec.ffn, hidden)
        yield f"{prefix}up", (spec.ffn, hidden)
        yield f"{prefix}down", (hidden, spec.ffn)
    if traits.post_norms:
        yield "post_ffn_norm", (hidden,)
