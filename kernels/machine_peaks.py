"""What this machine can do at best, measured: the two numbers that a step's time is held against.

    bytes_per_s                        reading memory that no cache holds, in huge pages
    wide_ops_per_s, narrow_ops_per_s   products of int16 pairs, and of bytes, accumulated in registers; each counts as two operations

The best of a few runs: a floor is what is possible, not what is usual. Takes a quarter of a second.
"""

import ctypes
from typing import Final, NamedTuple

from relay.kernels.cpp_library import library

_READ_BYTES: Final = 256 << 20


class Peaks(NamedTuple):
    bytes_per_s: float
    wide_ops_per_s: float
    narrow_ops_per_s: float


def peaks(*, threads: int, times: int = 5) -> Peaks:
    """Of so many threads together. Raises KernelsUnavailable, MemoryError."""
    dot_rate = library().relay_dot_rate
    dot_rate.restype = ctypes.c_double
    return Peaks(memory_rate(threads=threads, times=times), dot_rate(threads, 0, times), dot_rate(threads, 1, times))


def memory_rate(*, threads: int, times: int = 5) -> float:
    """`bytes_per_s` alone. Raises as `peaks` does."""
    read_rate = library().relay_read_rate
    read_rate.restype = ctypes.c_double
    bytes_per_s = float(read_rate(threads, ctypes.c_int64(_READ_BYTES), times))
    if not bytes_per_s:
        raise MemoryError(f"{_READ_BYTES >> 20} MiB to measure with are not there")
    return bytes_per_s
