"""Copies a layer's blocks into other workers' pools on a thread of its own, while the next layers are computed.

In: pushes, and the number of each layer as its KV is complete. Out: checksums of the source blocks. numpy copies and sums without the GIL,
and unlike torch brings no second team of compute threads to the cores.
"""

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from relay.engine.runner import Push
from relay.kv.memory import KVMemory, host_memory


class LayerPusher:
    """One step at a time: `start`, `layer` for each layer in order, `finish`."""

    def __init__(self, memory: KVMemory) -> None:
        self._memory = memory
        self._thread = ThreadPoolExecutor(1, "layer-pusher")
        self._pushes: Sequence[Push] = ()
        self._copied: list[Future[list[NDArray[np.uint64]]]] = []

    def start(self, pushes: Sequence[Push]) -> None:
        self._pushes, self._copied = pushes, []

    def layer(self, layer: int) -> None:
        """This layer's KV is complete for the step."""
        if self._pushes:
            self._copied.append(self._thread.submit(self._copy, layer, self._pushes))

    def finish(self) -> tuple[list[NDArray[np.uint64]], int]:
        """Wait for the last copy: (checksums uint64 [n_layers, n] of each push, nanoseconds waited)."""
        began = time.monotonic_ns()
        layers = [copied.result() for copied in self._copied]
        return [np.stack(sums) for sums in zip(*layers, strict=True)], time.monotonic_ns() - began

    def _copy(self, layer: int, pushes: Sequence[Push]) -> list[NDArray[np.uint64]]:
        sums = []
        for push in pushes:
            self._memory.copy_layer(layer, push.blocks, host_memory(push.target), push.target_blocks)
            sums.append(self._memory.checksums(push.blocks, layer))
        return sums
