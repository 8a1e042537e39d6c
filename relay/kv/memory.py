"""The bytes of a KV pool: a memfd that the root makes for one epoch of one worker, mapped by its owner and by whoever may push into it.

A memfd has no name: it is gone with its last holder, whatever is killed. It is sealed against resizing (a peer's ftruncate would be our
SIGBUS). A new one for each epoch makes a push of an old epoch land where nobody reads.
"""

import fcntl
import mmap
import os
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from relay.kv.checksum import checksum
from relay.kv.layout import KVLayout
from relay.kv.pool import KVPool
from relay.messages import PoolHandle


def create(name: str, size: int) -> int:
    """A sealed memfd of `size` bytes; the caller owns the descriptor."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return fd


def host_memory(pool: KVPool) -> "KVMemory":
    """The pool itself, where its bytes can be reached. Raises ValueError for one on a device."""
    if not isinstance(pool, KVMemory):
        raise ValueError(f"a pool of {pool.layout.layout_id} on a device exchanges no blocks with host memory")
    return pool


class KVMemory:
    """A `KVPool`: one mapping of one pool. Not unmapped before the process ends: views of it are alive everywhere."""

    handle: PoolHandle | None = None
    sums: Callable[[NDArray[np.uint64], NDArray[np.int32]], NDArray[np.uint64]] | None = None
    """A faster way to `checksums` than numpy's, which a runner may bring: of pages, of blocks."""

    def __init__(self, layout: KVLayout, fd: int | None = None) -> None:
        """Map `fd` (and close it), or private memory where there is none to share with."""
        self.layout = layout
        if fd is None:
            self._map = mmap.mmap(-1, layout.pool_bytes)
        else:
            self._map = mmap.mmap(fd, layout.pool_bytes)
            os.close(fd)
        words = layout.page_bytes // 8
        self.pages: NDArray[np.uint64] = np.frombuffer(self._map, dtype=np.uint64).reshape(layout.n_layers, 2, layout.n_blocks, words)

    def populate(self, start: int = 0, size: int | None = None) -> None:
        """Touch every page of `size` bytes from `start` on (a multiple of the page size), so that the first requests don't pay for it.
        Raises OSError where there is no memory, which would be a SIGBUS later."""
        size = len(self._map) - start if size is None else min(size, len(self._map) - start)
        self._map.madvise(23, start, size)  # MADV_POPULATE_WRITE

    def copy_layer(self, layer: int, blocks: NDArray[np.int32], target: "KVMemory", target_blocks: NDArray[np.int32]) -> None:
        """Copy one layer of `blocks` into `target_blocks` of another pool, in order."""
        source, sink = self.pages[layer], target.pages[layer]
        for i, j in zip(blocks, target_blocks, strict=True):
            sink[:, j] = source[:, i]

    def copy_block(self, source: int, target: int) -> None:
        """All of one block into another of this pool."""
        self.pages[:, :, target] = self.pages[:, :, source]

    def flip_bit(self, block: int) -> None:
        self.pages[0, 0, block, 0] ^= np.uint64(1)

    def checksums(self, blocks: NDArray[np.int32], layer: int | None = None) -> NDArray[np.uint64]:
        """uint64 [n_layers, len(blocks)], or [len(blocks)] of one layer."""
        if layer is not None:
            return checksum(self.pages[layer][:, blocks].swapaxes(0, 1))
        if self.sums is not None:
            return self.sums(self.pages, blocks)
        return np.stack([self.checksums(blocks, layer) for layer in range(self.layout.n_layers)])
