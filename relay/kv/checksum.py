"""A fast non-cryptographic 64-bit hash of a block's bytes in one layer, K and V together.

    sum over i of word[i] * coefficient[i]  mod 2^64

with the 64-bit little-endian words of K followed by those of V, and odd coefficients `splitmix64(i) | 1`. A change of any one word always
changes it (odd numbers are invertible mod 2^64); several changes cancel with probability 2^-63 or so. The sum may run in any order, so that
threads, vector lanes and GPU blocks can each take a part in the same pass that copies the bytes.
"""

from functools import cache

import numpy as np
from numpy.typing import NDArray


@cache
def coefficients(n_words: int) -> NDArray[np.uint64]:
    """uint64 [n_words], odd; the first n of a longer table are the same."""
    z = np.arange(1, n_words + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray((z ^ (z >> np.uint64(31))) | np.uint64(1), dtype=np.uint64)


def checksum(pages: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """pages: uint64 [..., 2, words of a page] -> uint64 [...]."""
    words = pages.shape[-1]
    table = coefficients(2 * words).reshape(2, words)
    return np.asarray((pages * table).sum(axis=(-2, -1), dtype=np.uint64))
