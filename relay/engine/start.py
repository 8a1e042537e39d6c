"""From a loaded runner to an engine that has computed once and knows what its steps cost. Imports no torch."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np

from relay.config import EngineConfig
from relay.engine.board import StepBoard
from relay.engine.drafter import NgramDrafter
from relay.engine.engine import Engine
from relay.engine.host import EngineHost
from relay.engine.measured import Measured
from relay.engine.runner import Batch, Runner
from relay.kv.book import BlockBook
from relay.policy.batching import StepClock

MANY_ROWS, FAR_TOKENS = 32, 1024


@dataclass(frozen=True)
class Compute:
    """A loaded runner, the least time that it could take for (rows, KV tokens), and what its thread has to do first.

    max_context: tokens of one sequence that it can compute. exact: whether its bits keep the law of exactness (`relay.engine.runner`); all
    do but cuBLAS and torch's attention. alone: no other worker of its device measures meanwhile. draft_rows: a decode step of so many rows
    takes little longer than one of one row, since it waits for the weights; 0 if that is not so. abandons: a step nobody wants ends early.
    """

    runner: Runner
    floor_ns: Callable[[int, int], int]
    on_thread_start: Callable[[], None]
    max_context: int
    exact: bool = True
    alone: Callable[[], AbstractContextManager[None]] = nullcontext
    draft_rows: int = 0
    abandons: bool = False


def start_engine(compute: Compute, config: EngineConfig, book: BlockBook, board: StepBoard, measured: Measured) -> EngineHost:
    """An engine that has computed, so that its first request finds everything warm."""
    runner = compute.runner
    far = _far(runner, compute.max_context)
    with compute.alone():
        runner.step(_prompt(runner, 1, 0))
        few = measured.value("few_rows_ms", lambda: step_ms(runner, 1))
        many = measured.value("many_rows_ms", lambda: step_ms(runner, MANY_ROWS))
        many_far = measured.value("many_rows_far_ms", lambda: step_ms(runner, MANY_ROWS, far))
    tile_ms = max((many - few) / max(1, MANY_ROWS // runner.tile_rows - 1), 1e-3)
    kv_ms = max(many_far - many, 0.0) / (MANY_ROWS * far) if far else 0.0
    prefill_ms = max(config.max_prefill_step_ms, config.max_step_ms) if compute.abandons else config.max_step_ms
    engine = Engine(
        runner,
        book,
        StepClock(runner.tile_rows, config.max_step_ms, tile_ms, max(few - tile_ms, 0.0), kv_ms, prefill_ms),
        max_running=config.max_running,
        max_chunk_tokens=config.max_chunk_tokens,
        floor_ns=compute.floor_ns,
        first=config.first,
        board=board,
        drafter=lambda _: NgramDrafter(),
        draft_rows=compute.draft_rows if config.speculative_tokens else 0,
        most_drafts=config.speculative_tokens,
    )
    return EngineHost(engine, max_running=config.max_running, exact=compute.exact, on_thread_start=compute.on_thread_start)


def _far(runner: Runner, max_context: int) -> int:
    """How far into a prompt the cost of attention is measured, in tokens; 0 where contexts are too short for it to matter."""
    pool = runner.layout.n_blocks * runner.layout.block_tokens
    return FAR_TOKENS if min(pool, max_context) >= 2 * FAR_TOKENS else 0


def step_ms(runner: Runner, n_rows: int, n_before: int = 0) -> float:
    """Milliseconds of a prompt's step behind `n_before` tokens, at best."""
    batch = _prompt(runner, n_rows, n_before)
    times = []
    for _ in range(3):
        started = time.perf_counter()
        runner.step(batch)
        times.append(1e3 * (time.perf_counter() - started))
    return min(times)


def _prompt(runner: Runner, n_rows: int, n_before: int) -> Batch:
    """A step of one prompt, at most as long as the pool. Nobody holds a block yet."""
    size = runner.layout.block_tokens
    n_rows = min(n_rows, runner.layout.n_blocks * size - n_before)
    return Batch(
        np.zeros(n_rows, dtype=np.int32),
        np.arange(n_before, n_before + n_rows, dtype=np.int32),
        np.zeros(n_rows, dtype=np.int32),
        np.arange(-(-(n_before + n_rows) // size), dtype=np.int32)[None],
        np.empty(0, dtype=np.int32),
        (),
    )
