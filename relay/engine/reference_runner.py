"""The runner that defines what is right: torch in float32, any CPU, exact by fixed tiles (`relay.model.tile`).

In: a `Batch`. Out: drawn tokens, log probabilities, checksums of what was pushed. The number of torch threads is the worker's to set.
"""

import torch

from relay.engine.layer_pusher import LayerPusher
from relay.engine.runner import Batch, StepResult
from relay.engine.sampler import choose
from relay.errors import ModelError
from relay.kv.layout import KVLayout
from relay.kv.memory import KVMemory
from relay.model.paged_kv import PagedKV
from relay.model.tile import TILE_ROWS
from relay.model.transformer import Transformer
from relay.model.weights import Weights


class ReferenceRunner:
    """A `Runner`. Owns no memory: the pool is its worker's, the weights may be shared."""

    def __init__(self, memory: KVMemory, weights: Weights, *, keep_logits: bool = False) -> None:
        """Raises ModelError if the pool is not laid out for this model."""
        spec, layout = weights.spec, memory.layout
        found = (layout.n_layers, layout.n_kv_heads, layout.head_dim)
        wanted = (spec.n_layers, spec.n_kv_heads, spec.head_dim)
        if found != wanted:
            raise ModelError(f"the KV pool has (layers, K/V heads, head width) {found}; the model needs {wanted}")
        self.memory = memory
        self.vocab_size = spec.vocab_size
        self.tile_rows = TILE_ROWS
        self.keep_logits = keep_logits
        self._transformer = Transformer(weights, PagedKV(memory))
        self._pusher = LayerPusher(memory)

    @property
    def layout(self) -> KVLayout:
        return self.memory.layout

    def step(self, batch: Batch) -> StepResult:
        """See `Runner.step`."""
        self._pusher.start(batch.pushes)
        with torch.inference_mode():
            logits = self._transformer.forward(
                batch.tokens, batch.positions, batch.sequence, batch.block_table, batch.logit_rows, self._pusher.layer
            ).numpy()
        chosen = [choose(row, draw) for row, draw in zip(logits, batch.draws, strict=True)]
        checksums, push_ns = self._pusher.finish()
        return StepResult(
            ids=[token for token, _ in chosen],
            logprobs=[logprobs for _, logprobs in chosen],
            checksums=checksums,
            logits=logits if self.keep_logits else None,
            push_ns=push_ns,
        )
