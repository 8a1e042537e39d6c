"""How many weights a model has, and how many a row of a step multiplies with: what memory plans and roofline floors are made of."""

from math import prod

from relay.model.slots import slots
from relay.model.spec import ModelSpec


def n_matrix_weights(spec: ModelSpec) -> int:
    """Weights of all matrices that a row passes, its experts alone and the output head included: two operations each."""
    attention = spec.hidden * spec.head_dim * (2 * spec.n_heads + 2 * spec.n_kv_heads)
    network = 3 * spec.hidden * spec.ffn * (spec.n_used or 1) + spec.hidden * spec.n_experts
    return spec.n_layers * (attention + network) + spec.hidden * spec.vocab_size


def n_weights(spec: ModelSpec) -> int:
    """All weights in memory; norms too. A tied embedding is there once."""
    return sum(prod(slot.shape) for slot in slots(spec))
