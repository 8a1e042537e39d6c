"""Copies layers into other workers' pools behind the step that computes them: on the copy stream, many layers to a launch.

In: pushes, and the number of each layer as its KV has been launched. Out: checksums of what was copied, made in the same pass. `finish`
waits: `Prefilled` leaves a worker only after its step, so the order between processes is the host's, and a handle needs to carry none.

No interprocess events, by which the reader's device would wait for the writer's. `Prefilled` is what tells a reader of the blocks, and it
carries the first token and the checksums: the host must have read both from the device, so it has waited for the step, and the event would
come after the news of what it announces. What a reader could save is only the wait behind the last layers' copy (`push_ns`, in every
ledger). And a writer may die before its event: then nothing says that a device which waits for it goes on, where an actor
hears `Down`.

A pool on a device that ours does not reach gets its blocks through pinned memory of the host: one launch here writes them there, and sums
them, and one over there reads them, behind it. Its owner sees no difference: it finds the same blocks, and the same checksums to verify.
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
from relay.kernels.device_runtime import Memory, Runtime
from relay.kernels.kv_transfer import kv_transfer

LEAST_PUSH_BYTES: Final = 4 << 20  # of layers that wait for each other: a launch costs more than moving less
BESIDE_A_STEP: Final = 16  # CUDA blocks of a copy while a step computes
STAGED_BYTES: Final = 64 << 20  # of pinned memory, if any is needed
_ALIGNED: Final = 4  # block numbers to 16 bytes, at which a kernel's argument begins


class _Copy:
    """One push: its blocks on their devices, and the layers that are not copied yet."""

    def __init__(self, own: DevicePool, push: Push) -> None:
        target = push.target
        if not isinstance(target, DevicePool) or target.layout.layout_id != own.layout.layout_id:
            raise ValueError(f"blocks of {own.layout.layout_id} on a device cannot be pushed to {target.layout.layout_id}")
        if len(push.blocks) != len(push.target_blocks):
            raise ValueError(f"{len(push.blocks)} blocks cannot be pushed to {len(push.target_blocks)}")
        self.target = target
        self.blocks, self.target_blocks = own.numbers(push.blocks), target.numbers(push.target_blocks)
        self.layer_bytes = 2 * own.layout.page_bytes * len(push.blocks)
        self.first = 0
        self.sums: list[list[Tensor]] = []  # of some layers each, in parts of some blocks
        self.slots = self.blocks[:0]  # of the staging, on the target's device


class _Staging:
    """Pinned memory of the host for `n_slots` blocks, laid out as a pool is. words: int64 [n_layers, 2, n_slots, words of a page]."""

    def __init__(self, own: DevicePool, runtime: Runtime, n_bytes: int) -> None:
        layout = own.layout
        self.n_slots = min(max(n_bytes // layout.block_bytes // _ALIGNED * _ALIGNED, _ALIGNED), layout.n_blocks)
        self._memory: Memory = runtime.pinned(self.n_slots * layout.block_bytes)
        self.words = self._memory.base.view(torch.int64).view(layout.n_layers, 2, self.n_slots, layout.page_bytes // 8)
        self.slots = own.numbers(np.arange(self.n_slots, dtype=np.int32))
        self.filled: set[int] = set()  # layers of this step that somebody may still read


class DevicePusher:
    """One step at a time: `start`, `layer` for each layer in order, `finish`. staged_bytes: of pinned memory, taken when first needed."""

    def __init__(self, own: DevicePool, runtime: Runtime, *, staged_bytes: int = STAGED_BYTES) -> None:
        self._own, self._runtime, self._staged_bytes = own, runtime, staged_bytes
        self._copies: list[_Copy] = []
        self._staging: _Staging | None = None

    def start(self, pushes: Sequence[Push]) -> None:
        """Raises ValueError for a pool that ours exchanges no blocks with."""
        self._copies = [_Copy(self._own, push) for push in pushes]
        for copy in self._copies:
            if copy.target.far is not None:
                if self._staging is None:
                    self._staging = _Staging(self._own, self._runtime, self._staged_bytes)
                copy.slots = copy.target.numbers(np.arange(self._staging.n_slots, dtype=np.int32))

    def layer(self, layer: int) -> None:
        """This layer's KV, and that of all before it, is on the computing stream."""
        for copy in self._copies:
            n_layers = layer + 1 - copy.first
            if n_layers * copy.layer_bytes < LEAST_PUSH_BYTES and layer + 1 < self._own.layout.n_layers:
                continue
            layers = range(copy.first, layer + 1)
            copy.first = layer + 1
            if copy.target.far is None:
                with self._runtime.copying():
                    copy.sums.append([self._transfer(self._own.words, copy.blocks, copy.target.words, copy.target_blocks, layers)])
            else:
                self._through_host(copy, layers)

    def _through_host(self, copy: _Copy, layers: range) -> None:
        """In as many parts as there is room for; each waits until the one that lay there before has been read."""
        staging, sums = self._staging, list[Tensor]()
        assert staging is not None
        for begin in range(0, max(len(copy.blocks), 1), staging.n_slots):
            blocks, target_blocks = (each[begin : begin + staging.n_slots] for each in (copy.blocks, copy.target_blocks))
            n = len(blocks)
            with self._runtime.copying(behind_peers=not staging.filled.isdisjoint(layers)):
                sums.append(self._transfer(self._own.words, blocks, staging.words, staging.slots[:n], layers))
            staging.filled.update(layers)
            with copy.target.there():
                self._transfer(staging.words, copy.slots[:n], copy.target.words, target_blocks, layers)
        copy.sums.append(sums)

    def _transfer(self, source: Tensor, blocks: Tensor, target: Tensor, target_blocks: Tensor, layers: range) -> Tensor:
        """Checksums, int64 [len(layers), len(blocks)], where the blocks' numbers are."""
        sums = blocks.new_zeros(len(layers), len(blocks), dtype=torch.int64)
        kv_transfer(source, blocks, target, target_blocks, layers, sums, cuda_blocks=BESIDE_A_STEP, on=self._runtime.on)
        return sums

    def finish(self) -> tuple[list[NDArray[np.uint64]], int]:
        """Wait for the last copy: (checksums uint64 [n_layers, n] of each push, nanoseconds waited)."""
        began = time.monotonic_ns()
        self._runtime.finish()
        found = [np.block([[part.cpu().numpy().view(np.uint64) for part in parts] for parts in copy.sums]) for copy in self._copies]
        self._copies = []
        if self._staging is not None:
            self._staging.filled.clear()
        return found, time.monotonic_ns() - began
