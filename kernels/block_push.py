"""Copies one page of a pool into another and sums it on the way: what a push costs beside the copy is one multiplication a word.

    sum over i of word[i] * coefficient[i]  mod 2^64        (`relay.kv.checksum`, which has the reason and the coefficients)

A step pushes a layer's blocks while its attention is computed, as further chunks of the same phase (`decoder_step`).
"""

import ctypes

import numpy as np
from numpy.typing import NDArray

from relay.kernels.cpp_library import library

Words = NDArray[np.uint64]


def copy_page(source: Words, target: Words, coefficients: Words) -> int:
    """uint64 [n] each, contiguous; returns the sum. Raises ValueError."""
    arrays = (source, target, coefficients)
    if len({len(array) for array in arrays}) != 1 or any(array.dtype != np.uint64 or not array.flags.c_contiguous for array in arrays):
        raise ValueError("source, target and coefficients are contiguous uint64 of one length")
    copy = library().relay_copy_page
    copy.restype = ctypes.c_uint64
    addresses = (ctypes.c_void_p(array.ctypes.data) for array in arrays)
    found: int = copy(*addresses, ctypes.c_size_t(len(source)))
    return found


def reference(source: Words, coefficients: Words) -> int:
    """The sum alone."""
    return int((source * coefficients).sum(dtype=np.uint64))
