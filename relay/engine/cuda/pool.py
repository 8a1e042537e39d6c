"""A KV pool in device memory: one plain allocation, a seal of 256 bytes and then the blocks in the reference layout.

`DevicePool.create` makes a worker's own, `DevicePool.open` maps another's by its handle. The seal holds the epoch and a random number: a
handle that outlived what it named may open other memory, and that is refused. A pool on a device that this one does not reach is `far`:
what is done with it is launched over there.
"""

import secrets
import struct
import weakref
from contextlib import AbstractContextManager
from typing import Final, Self

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from relay.kernels.device_runtime import Memory, Runtime
from relay.kernels.kv_transfer import kv_checksums, kv_transfer
from relay.kv.layout import KVLayout
from relay.messages import PoolHandle

SEAL_BYTES: Final = 256
TYPES: Final = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_SEAL: Final = struct.Struct("<8sqQ")
_MAGIC: Final = b"relay-kv"


class DevicePool:
    """A `KVPool`. words: int64 [n_layers, 2 (K, V), n_blocks, words of a page]. keys, values: by layer, as the kernels take them.

    Its memory is released with the last reference to it, so that no push can lose the ground it writes on.
    """

    def __init__(self, layout: KVLayout, runtime: Runtime, memory: Memory, handle: PoolHandle, far: int | None = None) -> None:
        """far: number of its device, if that is out of reach."""
        self.layout, self.far = layout, far
        self._place = runtime.place if far is None else memory.base.device
        self.handle: PoolHandle | None = handle
        self._runtime = runtime
        pages = memory.base[SEAL_BYTES : SEAL_BYTES + layout.pool_bytes]
        self.words = pages.view(torch.int64).view(layout.n_layers, 2, layout.n_blocks, layout.page_bytes // 8)
        shape = (layout.n_layers, 2, layout.n_blocks, layout.n_kv_heads, layout.block_tokens, layout.head_dim)
        sides = pages.view(TYPES[layout.dtype]).view(shape)
        self.keys, self.values = [layer[0] for layer in sides], [layer[1] for layer in sides]
        weakref.finalize(self, memory.release).atexit = False  # a process that ends gives everything back by itself

    @classmethod
    def create(cls, layout: KVLayout, runtime: Runtime, epoch: int) -> Self:
        """Zeros, sealed for this epoch."""
        memory = runtime.allocate(SEAL_BYTES + layout.pool_bytes)
        handle = PoolHandle(runtime.handle_of(memory), SEAL_BYTES, layout.pool_bytes, epoch, secrets.randbits(63), runtime.number)
        with runtime.computing():
            memory.base.zero_()
            memory.base[:SEAL_BYTES].copy_(torch.frombuffer(bytearray(_seal(handle)), dtype=torch.uint8))
            runtime.finish()
        return cls(layout, runtime, memory, handle)

    @classmethod
    def open(cls, layout: KVLayout, runtime: Runtime, handle: PoolHandle) -> Self:
        """layout: as ours, but for its size. Raises HandleRefused if that pool is there no more, or cannot be had."""
        if handle.offset != SEAL_BYTES or handle.n_bytes % layout.block_bytes:
            raise ValueError(f"a pool of {handle.n_bytes} bytes from {handle.offset} on does not hold blocks of {layout.block_bytes}")
        memory = runtime.open(handle.handle, SEAL_BYTES + handle.n_bytes, handle.device, _seal(handle))
        sized = msgspec.structs.replace(layout, n_blocks=handle.n_bytes // layout.block_bytes)
        return cls(sized, runtime, memory, handle, None if runtime.reaches(handle.device) else handle.device)

    def there(self) -> AbstractContextManager[None]:
        """Inside, launches run where this pool can be touched."""
        return self._runtime.computing() if self.far is None else self._runtime.on_peer(self.far)

    def copy_block(self, source: int, target: int) -> None:
        with self.there():
            sums = self._sums(1)
            blocks = self.numbers(np.asarray([source, target], np.int32))
            kv_transfer(self.words, blocks[:1], self.words, blocks[1:].clone(), range(self.layout.n_layers), sums, on=self._runtime.on)
        self._runtime.finish()

    def checksums(self, blocks: NDArray[np.int32]) -> NDArray[np.uint64]:
        with self.there():
            sums = self._sums(len(blocks))
            kv_checksums(self.words, self.numbers(blocks), range(self.layout.n_layers), sums, on=self._runtime.on)
        self._runtime.finish()
        return sums.cpu().numpy().view(np.uint64)

    def flip_bit(self, block: int) -> None:
        with self.there():
            self.words[0, 0, block, 0] ^= 1
        self._runtime.finish()

    def numbers(self, blocks: NDArray[np.int32]) -> Tensor:
        """Block numbers where what touches this pool is launched: on the device of `runtime`, wherever the blocks are, unless it is far."""
        return torch.tensor(np.asarray(blocks, np.int32), device=self._place)

    def _sums(self, n: int) -> Tensor:
        return torch.zeros(self.layout.n_layers, n, dtype=torch.int64, device=self._place)


def _seal(handle: PoolHandle) -> bytes:
    return _SEAL.pack(_MAGIC, handle.epoch, handle.nonce).ljust(SEAL_BYTES, b"\0")
