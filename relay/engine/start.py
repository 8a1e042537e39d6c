"""From a model file and a pool to an engine that has computed once: weights, runner, warm-up, and what this machine can do at best."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from relay.config import EngineConfig
from relay.engine.board import StepBoard
from relay.engine.engine import Engine
from relay.engine.host import EngineHost
from relay.engine.reference_runner import ReferenceRunner
from relay.engine.roofline import StepCost, measure
from relay.engine.runner import Batch, Runner
from relay.kv.book import BlockBook
from relay.kv.memory import KVMemory
from relay.model.load import load
from relay.model.size import n_matrix_weights
from relay.policy.batching import StepClock


@dataclass(frozen=True)
class Compute:
    """A loaded runner, the least time that it could take for (rows, KV tokens), and what its thread has to do first."""

    runner: Runner
    floor_ns: Callable[[int, int], int]
    on_thread_start: Callable[[], None]


def reference_compute(model_path: Path, memory: KVMemory, threads: int) -> Compute:
    """The torch runner. Raises ModelError."""
    torch.set_num_threads(threads)
    weights = load(model_path)
    spec, layout = weights.spec, memory.layout
    cost = StepCost(
        weight_bytes=4 * n_matrix_weights(spec),
        flops_per_row=2 * n_matrix_weights(spec),
        kv_token_bytes=layout.block_bytes // layout.block_tokens,
    )
    roofline = measure()
    return Compute(
        ReferenceRunner(memory, weights),
        lambda n_rows, n_kv_tokens: cost.floor_ns(roofline, n_rows, n_kv_tokens),
        lambda: torch.set_num_threads(threads),
    )


def start_engine(compute: Compute, config: EngineConfig, book: BlockBook, board: StepBoard) -> EngineHost:
    """An engine that has computed, so that its first request finds everything warm."""
    runner = compute.runner
    engine = Engine(
        runner,
        book,
        StepClock(runner.tile_rows, config.max_step_ms, _warm_up(runner)),
        max_running=config.max_running,
        max_chunk_tokens=config.max_chunk_tokens,
        floor_ns=compute.floor_ns,
        board=board,
    )
    return EngineHost(engine, max_running=config.max_running, on_thread_start=compute.on_thread_start)


def _warm_up(runner: Runner) -> float:
    """Milliseconds of a full tile; the first calls also build what libraries build lazily. Nobody holds a block yet."""
    n_rows = min(runner.tile_rows, runner.layout.block_tokens)
    nothing = np.empty(0, dtype=np.int32)
    batch = Batch(
        np.zeros(n_rows, dtype=np.int32),
        np.arange(n_rows, dtype=np.int32),
        np.zeros(n_rows, dtype=np.int32),
        np.zeros((1, 1), dtype=np.int32),
        nothing,
        (),
    )
    times = []
    for _ in range(3):
        started = time.perf_counter()
        runner.step(batch)
        times.append(1e3 * (time.perf_counter() - started))
    return min(times)
