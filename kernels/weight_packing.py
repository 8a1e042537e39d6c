"""From the rows of a file to packed groups: the same numbers in the order that `packed_matmul` streams through. Nothing is rounded.

    pack(Format.Q4_1, rows, n_in, to)     rows: uint8 [n_out, bytes of a row], as `relay.model.packed` hands them out

Packing is a move of bytes, limited by memory; groups are independent, so several threads may each pack a range of them (`first`, `n`).
The layouts on both sides: weight_packing.cpp (files), weight_formats.h (groups).
"""

import ctypes

import numpy as np
from numpy.typing import NDArray

from relay.kernels.cpp_library import library
from relay.kernels.packed_matmul import GROUP, Format, group_bytes

_SOURCE_BLOCKS = {  # inputs and bytes of a block in the file
    Format.Q4_0: (32, 18),
    Format.Q4_1: (32, 20),
    Format.Q8_0: (32, 34),
    Format.Q4_K: (256, 144),
    Format.Q6_K: (256, 210),
    Format.F16: (1, 2),
    Format.BF16: (1, 2),
    Format.F32: (1, 4),
}


def pack(kind: Format, rows: NDArray[np.uint8], n_in: int, to: NDArray[np.uint8], *, first: int = 0, n: int | None = None) -> None:
    """Pack groups [first, first + n) of a matrix, all by default. rows: uint8 [n_out, bytes of a row], contiguous.

    to: uint8 [bytes of the whole packed matrix], contiguous. Raises ValueError for shapes that do not fit.
    """
    elements, n_bytes = _SOURCE_BLOCKS[kind]
    if n_in % elements:
        raise ValueError(f"rows of {kind.name} are whole blocks of {elements}; {n_in} inputs are not")
    if rows.ndim != 2 or rows.shape[1] != n_in // elements * n_bytes or rows.dtype != np.uint8 or not rows.flags.c_contiguous:
        raise ValueError(
            f"rows of {n_in} inputs in {kind.name} are uint8 [n_out, {n_in // elements * n_bytes}], contiguous; got {rows.shape}"
        )
    n_groups = -(-len(rows) // GROUP)
    count = n_groups - first if n is None else n
    if to.dtype != np.uint8 or to.shape != (n_groups * group_bytes(kind, n_in),) or not to.flags.c_contiguous or not to.flags.writeable:
        raise ValueError(f"the packed matrix has {n_groups * group_bytes(kind, n_in)} bytes; got {to.shape}")
    if first < 0 or count < 0 or first + count > n_groups:
        raise ValueError(f"groups {first} to {first + count} are not among {n_groups}")
    library().relay_pack_groups(
        ctypes.c_int32(kind),
        ctypes.c_void_p(rows.ctypes.data),
        ctypes.c_int(len(rows)),
        ctypes.c_int(n_in),
        ctypes.c_int(first),
        ctypes.c_int(count),
        ctypes.c_void_p(to.ctypes.data),
    )
