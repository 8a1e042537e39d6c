"""A runner without a model: its KV is a chain of digests, and its tokens depend on every slot that it reads back.

Each slot holds a digest of its token, its position and the slot before it; the next token is a keyed hash of all slots that the step reads
through the block table. So a push that was missed, a block reused too early, a stale epoch or a wrong block number changes the tokens that
follow, as it would with a real model, at a thousandth of the cost. For the simulation, and for tests of whatever decides above a runner.
"""

import numpy as np

from relay.engine.runner import Batch, Draw, StepResult
from relay.kv.layout import KVLayout
from relay.kv.memory import KVMemory
from relay.messages import Logprobs

_MASK = (1 << 64) - 1
_SEED = 0x243F6A8885A308D3


def layout(n_blocks: int) -> KVLayout:
    """One layer whose K page is one 64-bit digest a token."""
    return KVLayout(n_layers=1, n_kv_heads=1, head_dim=2, block_tokens=16, dtype="float32", n_blocks=n_blocks)


def digest(previous: int, token: int, position: int) -> int:
    """What a slot holds; `previous` is the slot before it, or the seed."""
    return _mix(previous ^ _mix(token + 1) ^ (position * 0x9E3779B97F4A7C15))


def next_token(tokens: list[int], vocab_size: int, uniform: float = 0.0) -> int:
    """What the runner draws after `tokens` if every slot is right: the oracle of its tests."""
    digests, previous = [], _SEED
    for position, token in enumerate(tokens):
        previous = digest(previous, token, position)
        digests.append(previous)
    return _draw(np.asarray(digests, dtype=np.uint64), vocab_size, uniform)


class ModelledRunner:
    """`Runner` over a pool of `layout(n)`. Draws ids 3 and up, so that tests may use 0 to 2 as stop ids that never come by chance."""

    def __init__(self, memory: KVMemory, vocab_size: int = 1000, tile_rows: int = 16) -> None:
        self.memory, self.vocab_size, self.tile_rows = memory, vocab_size, tile_rows
        self.keep_logits = False

    @property
    def layout(self) -> KVLayout:
        return self.memory.layout

    def step(self, batch: Batch) -> StepResult:
        """See `Runner`."""
        keys, size = self.memory.pages[0, 0], self.layout.block_tokens
        for token, position, owner in zip(batch.tokens.tolist(), batch.positions.tolist(), batch.sequence.tolist(), strict=True):
            table = batch.block_table[owner]
            previous = int(keys[table[(position - 1) // size], (position - 1) % size]) if position else _SEED
            keys[table[position // size], position % size] = digest(previous, token, position)
        checksums = []
        for push in batch.pushes:
            self.memory.copy_layer(0, push.blocks, push.target, push.target_blocks)
            checksums.append(self.memory.checksums(push.blocks))
        ids, logprobs = [], []
        for row, draw in zip(batch.logit_rows.tolist(), batch.draws, strict=True):
            ids.append(draw.target if draw.target >= 0 else self._next(batch, row, draw))
            logprobs.append(Logprobs(-1.0) if draw.target >= 0 or draw.sampling.logprobs >= 0 else None)
        return StepResult(ids, logprobs, checksums)

    def _next(self, batch: Batch, row: int, draw: Draw) -> int:
        n_tokens = int(batch.positions[row]) + 1
        blocks = batch.block_table[batch.sequence[row], : self.layout.blocks_for(n_tokens)]
        return _draw(self.memory.pages[0, 0][blocks].reshape(-1)[:n_tokens], self.vocab_size, draw.uniform)


def _draw(digests: np.ndarray, vocab_size: int, uniform: float) -> int:
    weights = np.arange(1, 2 * len(digests), 2, dtype=np.uint64)
    return 3 + _mix(int((digests * weights).sum(dtype=np.uint64)) ^ int(uniform * (1 << 53))) % (vocab_size - 3)


def _mix(z: int) -> int:
    z = (z + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
