"""A worker's end of the transport as a process: owns a pool, opens others', pushes into them, and does as it is told on standard input.

`python -m tests.engine.transport.peer BACKEND`; each line in is a JSON object with `do`, each line out its answer. BACKEND: `memfd`, a
descriptor from whoever starts it; `emulated` and `cuda`, handles of device memory; `emulated_far` and `cuda_far`, the same
without peer access.
"""

import json
import os
import sys
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from relay.engine.runner import Push
from relay.kv.layout import KVLayout
from relay.kv.pool import KVPool
from relay.kv.pools import Map, Pools
from relay.log import configure
from relay.messages import Address, PoolHandle

LAYOUT = KVLayout(n_layers=3, n_kv_heads=2, head_dim=64, block_tokens=16, dtype="bfloat16", n_blocks=12)


class Pusher(Protocol):
    """push and complete, as a runner uses them."""

    def start(self, pushes: list[Push]) -> None: ...
    def layer(self, layer: int) -> None: ...
    def finish(self) -> tuple[list[NDArray[np.uint64]], int]: ...


class Backend(Protocol):
    def create(self, epoch: int, fd: int, n_blocks: int) -> KVPool: ...
    def fill(self, pool: KVPool, seed: int) -> None: ...
    def mapping(self, own: KVPool, fds: dict[int, int]) -> Map: ...
    def pusher(self, own: KVPool) -> Pusher: ...


class MemfdBackend:
    def create(self, epoch: int, fd: int, n_blocks: int) -> KVPool:
        from relay.kv.memory import KVMemory

        return KVMemory(msgspec.structs.replace(LAYOUT, n_blocks=n_blocks), None if fd < 0 else os.dup(fd))

    def fill(self, pool: KVPool, seed: int) -> None:
        from relay.kv.memory import host_memory

        pages = host_memory(pool).pages
        pages[:] = np.random.default_rng(seed).integers(0, 2**63, pages.shape, dtype=np.uint64)

    def mapping(self, own: KVPool, fds: dict[int, int]) -> Map:
        from relay.kv.pools import shared_memory

        return shared_memory(own.layout, lambda address: fds.get(address.epoch))

    def pusher(self, own: KVPool) -> Any:
        from relay.engine.layer_pusher import LayerPusher
        from relay.kv.memory import host_memory

        return LayerPusher(host_memory(own))


class DeviceBackend:
    def __init__(self, kind: str) -> None:
        from relay.kernels import kv_transfer
        from relay.kernels.device_runtime import CudaRuntime
        from relay.kernels.emulator.runtime import EmulatedRuntime

        device, _, far = kind.partition("_")
        self.runtime: Any = (
            CudaRuntime(0, peer_access=not far) if device == "cuda" else EmulatedRuntime(kv_transfer.PROGRAMS, peer_access=not far)
        )

    def create(self, epoch: int, fd: int, n_blocks: int) -> KVPool:
        from relay.engine.cuda.pool import DevicePool

        return DevicePool.create(msgspec.structs.replace(LAYOUT, n_blocks=n_blocks), self.runtime, epoch)

    def fill(self, pool: KVPool, seed: int) -> None:
        import torch

        words: Any = pool.words  # type: ignore[attr-defined]
        words.copy_(torch.randint(0, 2**62, words.shape, generator=torch.Generator().manual_seed(seed)))

    def mapping(self, own: KVPool, fds: dict[int, int]) -> Map:
        from relay.engine.cuda.compute import device_pools

        return device_pools(own.layout, self.runtime)

    def pusher(self, own: Any) -> Any:
        from relay.engine.cuda.pusher import DevicePusher

        return DevicePusher(own, self.runtime, staged_bytes=4 * LAYOUT.block_bytes)  # too little for most, so that it is used again


class Peer:
    """Method `on_X` answers {"do": "X", ...}."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._fds: dict[int, int] = {}
        self.own: Any = None
        self._pools: Pools | None = None
        self._target: KVPool | None = None

    def on_create(self, epoch: int, fd: int = -1, n_blocks: int = LAYOUT.n_blocks, seed: int = 0) -> Any:
        self.own = self._backend.create(epoch, fd, n_blocks)
        if seed:
            self._backend.fill(self.own, seed)
        self._pools = Pools(self.own, (Address("decode/9", epoch),), self._backend.mapping(self.own, self._fds))
        self._pusher = self._backend.pusher(self.own)
        return None if self.own.handle is None else msgspec.to_builtins(self.own.handle)

    def on_open(self, epoch: int, fd: int = -1, handle: Any = None) -> str:
        """Whether `decode/0` of that life can be opened, and whether it is what was open before."""
        assert self._pools is not None
        self._fds[epoch] = fd
        found = self._pools.open(Address("decode/0", epoch), None if handle is None else msgspec.convert(handle, PoolHandle))
        if found is None:
            return "refused"
        same, self._target = found is self._target, found
        return "the same" if same else "opened"

    def on_open_own(self, epoch: int) -> bool:
        assert self._pools is not None
        return self._pools.open(Address("decode/9", epoch), None) is self.own

    def on_push(self, blocks: list[int], to: list[int], layers: int = LAYOUT.n_layers) -> list[list[str]] | None:
        """The checksums; None if it stopped before the last layer."""
        assert self._target is not None
        self._pusher.start([Push(self._target, np.asarray(blocks, np.int32), np.asarray(to, np.int32))])
        for layer in range(layers):
            self._pusher.layer(layer)
        if layers < LAYOUT.n_layers:
            return None
        (sums,), _ = self._pusher.finish()
        return [[str(value) for value in row] for row in sums.tolist()]

    def on_push_straight(self, blocks: list[int], to: list[int]) -> None:
        """As if the target's device were in reach. What is out of it is an error of the device, told as one of values."""
        from relay.kernels.emulator.device import EmulatorError

        target: Any = self._target
        target.far = None
        try:
            self.on_push(blocks, to)
        except EmulatorError as error:
            raise ValueError(str(error)) from error
        finally:
            target.far = 0

    def on_sums(self, blocks: list[int], of: str = "own") -> list[list[str]]:
        pool: Any = self.own if of == "own" else self._target
        return [[str(value) for value in row] for row in pool.checksums(np.asarray(blocks, np.int32)).tolist()]

    def on_word(self) -> str:
        """The first of block 0 of the target, as this process sees it."""
        target: Any = self._target
        return hex(int(target.words[0, 0, 0, 0]) & (1 << 64) - 1)

    def on_flip(self, block: int) -> None:
        self.own.flip_bit(block)

    def on_close(self, epoch: int) -> None:
        assert self._pools is not None
        self._pools.close(Address("decode/0", epoch))
        self._target = None

    def on_free(self) -> None:
        """The pool itself goes; a process that ends gives it back without that."""
        self._pools = self._pusher = self.own = None  # type: ignore[assignment]


def main(kind: str) -> None:
    configure("peer")  # logs go to standard error, answers to standard output
    peer = Peer(MemfdBackend() if kind == "memfd" else DeviceBackend(kind))
    for line in sys.stdin:
        told = json.loads(line)
        try:
            answer = {"answer": getattr(peer, f"on_{told.pop('do')}")(**told)}
        except ValueError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
