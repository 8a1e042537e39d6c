"""A machine that takes its time and computes nothing: what steps cost, a pool without bytes, a runner that draws one token for ever.

What depends on KV, tokens above all, is not to be had here. What depends on lengths, block keys and time is as on a machine of that speed:
which prompts are computed where, what is cached and evicted, how long everybody waits.
"""

import msgspec
import numpy as np
from numpy.typing import NDArray

from relay.engine.modelled_runner import layout
from relay.engine.runner import Batch, StepResult
from relay.messages import PoolHandle

ANSWER = 0  # the id of every token that is drawn; no prompt has it
BLOCK_TOKENS = 16


class StepCost(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds: of any step; of each row; of each row whose next token is drawn; of each pair of a row and a token it looks back at.

    The defaults fit SmolLM2-135M (Q4_1, a16) on two threads with AVX2, from scripts/measured/cpu-2026-11-30.md: decode at batch 1 takes
    4.6 ms (the line gives 4.6), at batch 16 32.1 (32.4), a prompt of 512 827 (817), the last 512 of 2,048 1,388 (1,431); 0.7 ms of
    Python is added to each.
    """

    fixed_ms: float = 3.5
    row_ms: float = 1.39
    drawn_ms: float = 0.36
    pair_ms: float = 0.00078

    def step_ms(self, n_rows: int, n_drawn: int, n_pairs: int) -> float:
        return self.fixed_ms + self.row_ms * n_rows + self.drawn_ms * n_drawn + self.pair_ms * n_pairs

    def prompt_ms(self, n_cached: int, n_tokens: int) -> float:
        """Of a prompt whose first `n_cached` tokens need not be computed, without what each step costs."""
        n_pairs = (n_tokens * (n_tokens + 1) - n_cached * (n_cached + 1)) // 2
        return self.row_ms * (n_tokens - n_cached) + self.pair_ms * n_pairs


class NoBytes:
    """`KVPool` of a size."""

    handle: PoolHandle | None = None

    def __init__(self, n_blocks: int) -> None:
        self.layout = layout(n_blocks, block_tokens=BLOCK_TOKENS)

    def copy_block(self, source: int, target: int) -> None:
        pass

    def checksums(self, blocks: NDArray[np.int32]) -> NDArray[np.uint64]:
        return np.zeros((1, len(blocks)), dtype=np.uint64)

    def flip_bit(self, block: int) -> None:
        raise AssertionError("there is no bit here to flip")


class TimedRunner:
    """`Runner`. `step` takes no time itself; `step_ms` says what the machine would have taken."""

    vocab_size, tile_rows, keep_logits = 1000, 1, False

    def __init__(self, memory: NoBytes, cost: StepCost) -> None:
        self.memory, self.layout, self._cost = memory, memory.layout, cost

    def step_ms(self, batch: Batch) -> float:
        n_rows = len(batch.tokens)
        return self._cost.step_ms(n_rows, len(batch.logit_rows), int(batch.positions.sum()) + n_rows)

    def step(self, batch: Batch) -> StepResult:
        n = len(batch.draws)
        return StepResult([ANSWER] * n, [None] * n, [self.memory.checksums(push.blocks) for push in batch.pushes])
