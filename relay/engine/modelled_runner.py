"""A runner without a model: its KV is a chain of digests, and its tokens depend on every slot that it reads back.

Each slot holds a digest of its token, its position and the slot before it; the next token is a keyed hash of all slots that the step reads
through the block table. So a push that was missed, a block reused too early, a stale epoch or a wrong block number changes the tokens that
follow, as it would with a real model, at a thousandth of the cost. For the simulation, and for tests of whatever decides above a runner.
"""

import numpy as np
from numpy.typing import NDArray

from relay.engine.runner import Batch, Draw, StepResult
from relay.kv.layout import KVLayout
from relay.kv.memory import KVMemory, host_memory
from relay.messages import Logprobs

_MASK = (1 << 64) - 1
_SEED = 0x243F6A8885A308D3
_LAYER = 0xD1342543DE82EF95


def layout(n_blocks: int, *, block_tokens: int = 16, n_layers: int = 1) -> KVLayout:
    """A K page holds one 64-bit digest a token; every layer's is another function of it."""
    return KVLayout(n_layers=n_layers, n_kv_heads=1, head_dim=2, block_tokens=block_tokens, dtype="float32", n_blocks=n_blocks)


def digest(previous: int, token: int, position: int) -> int:
    """What a slot of layer 0 holds; `previous` is the slot before it, or the seed. Layer n holds n times `_LAYER` more."""
    return _mix(previous ^ _mix(token + 1) ^ (position * 0x9E3779B97F4A7C15))


class Oracle:
    """What a runner draws after some tokens if every slot that it reads is right."""

    def __init__(self, vocab_size: int, n_layers: int = 1) -> None:
        self._vocab_size, self._n_layers = vocab_size, n_layers
        self._previous, self._sum, self._n = _SEED, 0, 0

    def push(self, token: int) -> None:
        """One token more."""
        self._previous = digest(self._previous, token, self._n)
        weight = 2 * self._n + 1
        self._sum += weight * sum(self._previous + layer * _LAYER for layer in range(self._n_layers))
        self._n += 1

    def next_token(self, uniform: float = 0.0) -> int:
        return _draw(self._sum & _MASK, self._vocab_size, uniform)


def next_token(tokens: list[int], vocab_size: int, uniform: float = 0.0) -> int:
    """Of a runner with one layer."""
    oracle = Oracle(vocab_size)
    for token in tokens:
        oracle.push(token)
    return oracle.next_token(uniform)


class ModelledRunner:
    """`Runner` over a pool of `layout(n)`. Draws ids 3 and up, so that tests may use 0 to 2 as stop ids that never come by chance.

    `compute`, pushes, `draw` are `step`'s three parts, for whoever lets time pass between them.
    """

    def __init__(self, memory: KVMemory, vocab_size: int = 1000, tile_rows: int = 16) -> None:
        self.memory, self.vocab_size, self.tile_rows = memory, vocab_size, tile_rows
        self.keep_logits = False
        self._layers = np.arange(memory.layout.n_layers, dtype=np.uint64) * np.uint64(_LAYER)

    @property
    def layout(self) -> KVLayout:
        return self.memory.layout

    def step(self, batch: Batch) -> StepResult:
        """See `Runner`."""
        self.compute(batch, 0, len(batch.tokens))
        checksums = []
        for push in batch.pushes:
            for layer in range(self.layout.n_layers):
                self.memory.copy_layer(layer, push.blocks, host_memory(push.target), push.target_blocks)
            checksums.append(self.memory.checksums(push.blocks))
        return self.draw(batch, checksums)

    def compute(self, batch: Batch, first: int, last: int) -> None:
        """Write the slots of rows `first` to `last` - 1."""
        keys, size = self.memory.pages[:, 0], self.layout.block_tokens
        rows = slice(first, last)
        for token, position, owner in zip(
            batch.tokens[rows].tolist(), batch.positions[rows].tolist(), batch.sequence[rows].tolist(), strict=True
        ):
            table = batch.block_table[owner]
            previous = int(keys[0, table[(position - 1) // size], (position - 1) % size]) if position else _SEED
            keys[:, table[position // size], position % size] = np.uint64(digest(previous, token, position)) + self._layers

    def draw(self, batch: Batch, checksums: list[NDArray[np.uint64]]) -> StepResult:
        """The tokens, from what the pool holds now."""
        ids, logprobs = [], []
        for row, draw in zip(batch.logit_rows.tolist(), batch.draws, strict=True):
            ids.append(draw.target if draw.target >= 0 else self._next(batch, row, draw))
            logprobs.append(Logprobs(-1.0) if draw.target >= 0 or draw.sampling.logprobs >= 0 else None)
        return StepResult(ids, logprobs, checksums)

    def _next(self, batch: Batch, row: int, draw: Draw) -> int:
        n_tokens = int(batch.positions[row]) + 1
        blocks = batch.block_table[batch.sequence[row], : self.layout.blocks_for(n_tokens)]
        slots = self.memory.pages[:, 0][:, blocks].reshape(self.layout.n_layers, -1)[:, :n_tokens]
        weights = np.arange(1, 2 * n_tokens, 2, dtype=np.uint64)
        return _draw(int((slots * weights).sum(dtype=np.uint64)), self.vocab_size, draw.uniform)


def _draw(total: int, vocab_size: int, uniform: float) -> int:
    return 3 + _mix(total ^ int(uniform * (1 << 53))) % (vocab_size - 3)


def _mix(z: int) -> int:
    z = (z + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
