"""The native runner, mapped and ready: what `relay.engine.start` needs of it, with the floor of a step measured on this machine.

No torch is imported here: a worker starts in a fraction of a second.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import numpy as np

from relay.engine.measured import Measured
from relay.engine.native.runner import NativeRunner
from relay.engine.start import Compute, step_ms
from relay.kv.memory import KVMemory

_PROBE_ROWS = 64
_DRAFT_ROWS = 4  # with AVX2 a step of two rows takes a sixth longer than one of one, of four a half; guesses that come are worth that


def native_compute(memory: KVMemory, weights_fd: int, *, threads: int, activations: Literal["a16", "a8"], measured: Measured) -> Compute:
    """The descriptor stays the caller's. Raises ModelError, KernelsUnavailable."""
    runner = NativeRunner(memory, weights_fd, threads=threads, activations=activations)
    weight_bytes = runner.mapping.size
    bytes_per_s = measured.value("bytes_per_s", lambda: _bandwidth(runner, threads))
    n_rows = min(_PROBE_ROWS, memory.layout.n_blocks * memory.layout.block_tokens)
    row_ns = measured.value("row_ns", lambda: 1e6 * step_ms(runner, n_rows) / n_rows)
    kv_token_bytes = memory.layout.block_bytes // memory.layout.block_tokens

    def floor_ns(n_rows: int, n_kv_tokens: int) -> int:
        moving = 1e9 * (weight_bytes + kv_token_bytes * n_kv_tokens) / bytes_per_s
        return int(max(moving, row_ns * n_rows))

    return Compute(runner, floor_ns, lambda: None, runner.spec.max_context, draft_rows=_DRAFT_ROWS, abandons=True)


def _bandwidth(runner: NativeRunner, threads: int) -> float:
    """Bytes per second of reading the packed weights themselves, on as many threads as compute; the best of three."""
    words = runner.mapping.data[: runner.mapping.size // 8 * 8].view(np.uint64)
    parts = np.array_split(words, threads)
    best = float("inf")
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(3):
            started = time.perf_counter()
            list(pool.map(np.bitwise_xor.reduce, parts))
            best = min(best, time.perf_counter() - started)
    return words.nbytes / best
