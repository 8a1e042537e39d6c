"""How many weights a model has, and how many a row of a step multiplies with: what memory plans and roofline floors are made of."""

from relay.model.spec import ModelSpec


def n_matrix_weights(spec: ModelSpec) -> int:
    """Weights of all matrices that a row passes, the output head included: two operations each."""
    attention = spec.hidden * spec.head_dim * (2 * spec.n_heads + 2 * spec.n_kv_heads)
    return spec.n_layers * (attention + 3 * spec.hidden * spec.ffn) + spec.hidden * spec.vocab_size


def n_weights(spec: ModelSpec) -> int:
    """All weights in memory; norms too. A tied embedding is there once."""
    embedding = 0 if spec.tied_embeddings else spec.hidden * spec.vocab_size
    return n_matrix_weights(spec) + embedding + (2 * spec.n_layers + 1) * spec.hidden
