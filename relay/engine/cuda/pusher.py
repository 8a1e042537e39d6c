"""Copies layers into other workers' pools behind the step that computes them: on the copy stream, many layers to a launch.

In: pushes, and the number of each layer as its KV has been launched. Out: checksums of what was copied, made in the same pass. `finish`
waits: `Prefilled` leaves a worker only after its step, so the order between processes is the host's, and a handle needs to carry none.
"""

import time
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from relay.engine.cuda.pool import DevicePool
from relay.engine.runner import Push
from relay.kernels.device_runtime import Runtime
from relay.kernels.kv_transfer import kv_transfer

LEAST_PUSH_BYTES: Final = 4 << 20  # of layers that wait for each other: a launch costs more than moving less
BESIDE_A_STEP: Final = 16  # CUDA blocks of a copy while a step computes


class _Copy:
    """One push: its blocks on the device, and the layers that are not copied yet."""

    def __init__(self, own: DevicePool, push: Push) -> None:
        target = push.target
        if not isinstance(target, DevicePool) or target.layout.layout_id != own.layout.layout_id:
            raise ValueError(f"blocks of {own.layout.layout_id} on a device cannot be pushed to {target.layout.layout_id}")
        if len(push.blocks) != len(push.target_blocks):
            raise ValueError(f"{len(push.blocks)} blocks cannot be pushed to {len(push.target_blocks)}")
        self.target = target
        self.blocks, self.target_blocks = own.numbers(push.blocks), own.numbers(push.target_blocks)
        self.layer_bytes = 2 * own.layout.page_bytes * len(push.blocks)
        self.first = 0
        self.sums: list[Tensor] = []


class DevicePusher:
    """One step at a time: `start`, `layer` for each layer in order, `finish`."""

    def __init__(self, own: DevicePool, runtime: Runtime) -> None:
        self._own, self._runtime = own, runtime
        self._copies: list[_Copy] = []

    def start(self, pushes: Sequence[Push]) -> None:
        """Raises ValueError for a pool that ours exchanges no blocks with."""
        self._copies = [_Copy(self._own, push) for push in pushes]

    def layer(self, layer: int) -> None:
        """This layer's KV, and that of all before it, is on the computing stream."""
        for copy in self._copies:
            n_layers = layer + 1 - copy.first
            if n_layers * copy.layer_bytes < LEAST_PUSH_BYTES and layer + 1 < self._own.layout.n_layers:
                continue
            layers = range(copy.first, layer + 1)
            copy.first = layer + 1
            with self._runtime.copying():
                sums = copy.blocks.new_zeros(n_layers, len(copy.blocks), dtype=torch.int64)
                copy.sums.append(sums)
                kv_transfer(
                    self._own.words,
                    copy.blocks,
                    copy.target.words,
                    copy.target_blocks,
                    layers,
                    sums,
                    cuda_blocks=BESIDE_A_STEP,
                    on=self._runtime.on,
                )

    def finish(self) -> tuple[list[NDArray[np.uint64]], int]:
        """Wait for the last copy: (checksums uint64 [n_layers, n] of each push, nanoseconds waited)."""
        began = time.monotonic_ns()
        self._runtime.finish()
        found = [np.concatenate([sums.cpu().numpy().view(np.uint64) for sums in copy.sums]) for copy in self._copies]
        self._copies = []
        return found, time.monotonic_ns() - began
