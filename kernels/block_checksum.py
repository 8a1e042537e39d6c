"""Sums blocks where they lie in a pool: what a receiver compares with the sums of a push. Copies nothing, and needs no GIL.

of each layer and block: sum over i of word[i] * coefficient[i]  mod 2^64        (`relay.kv.checksum`, the words of K, then those of V)
"""

import ctypes

import numpy as np
from numpy.typing import NDArray

from relay.kernels.cpp_library import library
from relay.kv.checksum import checksum, coefficients


def block_checksums(pages: NDArray[np.uint64], blocks: NDArray[np.int32]) -> NDArray[np.uint64]:
    """pages: uint64 [n_layers, 2, n_blocks of the pool, words], contiguous -> uint64 [n_layers, len(blocks)]. Raises ValueError."""
    n_layers, sides, n_pool_blocks, n_words = pages.shape
    blocks = np.ascontiguousarray(blocks, np.int32)
    if pages.dtype != np.uint64 or sides != 2 or not pages.flags.c_contiguous:
        raise ValueError("pages are contiguous uint64, K and V of each layer")
    if len(blocks) and not (blocks.min() >= 0 and blocks.max() < n_pool_blocks):
        raise ValueError(f"blocks are 0 to {n_pool_blocks - 1}")
    table, sums = coefficients(2 * n_words), np.empty((n_layers, len(blocks)), np.uint64)
    library().relay_block_checksums(
        ctypes.c_void_p(pages.ctypes.data),
        ctypes.c_int32(n_layers),
        ctypes.c_int32(n_pool_blocks),
        ctypes.c_int64(n_words),
        ctypes.c_void_p(table.ctypes.data),
        ctypes.c_void_p(blocks.ctypes.data),
        ctypes.c_int32(len(blocks)),
        ctypes.c_void_p(sums.ctypes.data),
    )
    return sums


def reference(pages: NDArray[np.uint64], blocks: NDArray[np.int32]) -> NDArray[np.uint64]:
    """The same, layer by layer, of a copy."""
    return np.stack([checksum(layer[:, blocks].swapaxes(0, 1)) for layer in pages])
