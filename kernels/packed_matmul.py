"""y = W x over weights that stay as packed as their file has them, for a few rows (bound by memory) or many (bound by arithmetic).

    integer formats, in blocks of 32 inputs    w = d q + m    x = s t
        y[r, c] = chain over blocks b of   acc = fma(float(sum_k q[c, k] t[r, k]), d s, acc)   acc = fma(m, s sum_k t[r, k], acc)
    float formats                              y[r, c] = chain over k of acc = fma(w[c, k], x[r, k], acc)

An activation x is rounded, for each block of 32, to |t| <= 32,512 (wide), or 127 (narrow, for weights of 4 bits only, whose bytes are then
multiplied twice as fast): t = round(x top / max|x|), s = max|x| / top. The sum
of products is exact in int32, and each output has one chain in float32, so a row's bits depend on that row alone, whatever instructions
compute it. `simd.h`: sixteen lanes; `weight_formats.h`: layouts; `weight_packing.py`: how a file's rows get there.

    Format     bits a weight packed    in the file    what a block of 32 has
    Q4_0       4.5                     4.5            d
    Q4_1       5                       5              d, m
    Q8_0       8.5                     8.5            d
    Q4_K       4.75                    4.5            scale and min of 8 bits, d and dmin for 8 blocks
    Q6_K       7.125                   6.5625         a scale of 8 bits for each 16 inputs, d for 8 blocks
    F16, BF16  16                      16
    F32        32                      32

A matrix [n_out, n_in] is cut into groups of 16 outputs; n_out is filled up to 16, n_in to 32, with zeros.
"""

import ctypes
from enum import IntEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from relay.kernels.cpp_library import library

GROUP: Final = 16
BLOCK: Final = 32
TOP_WIDE: Final = 32512
TOP_NARROW: Final = 127


class Format(IntEnum):
    """As in packed_matmul.h."""

    Q4_0 = 0
    Q4_1 = 1
    Q8_0 = 2
    Q4_K = 3
    Q6_K = 4
    F16 = 5
    BF16 = 6
    F32 = 7

    @property
    def is_float(self) -> bool:
        return self >= Format.F16

    @property
    def has_four_bits(self) -> bool:
        return self in (Format.Q4_0, Format.Q4_1, Format.Q4_K)


_BLOCK_BYTES: Final = {  # quants and scales of a block, and what 8 blocks share
    Format.Q4_0: (288, 0),
    Format.Q4_1: (320, 0),
    Format.Q8_0: (544, 0),
    Format.Q4_K: (288, 64),
    Format.Q6_K: (416, 32),
    Format.F16: (1024, 0),
    Format.BF16: (1024, 0),
    Format.F32: (2048, 0),
}


class Matrix(ctypes.Structure):
    """As in packed_matmul.h: where a packed matrix lies, and its shape."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("n_out", ctypes.c_int32),
        ("n_in", ctypes.c_int32),
        ("n_groups", ctypes.c_int32),
        ("n_blocks", ctypes.c_int32),
        ("group_bytes", ctypes.c_size_t),
        ("format", ctypes.c_int32),
        ("narrow", ctypes.c_int32),
    )


def padded(n: int, unit: int) -> int:
    return -(-n // unit) * unit


def group_bytes(kind: Format, n_in: int) -> int:
    """Of 16 outputs."""
    n_blocks = -(-n_in // BLOCK)
    block, shared = _BLOCK_BYTES[kind]
    return padded(n_blocks * block + -(-n_blocks // 8) * shared, 64)


def matrix_bytes(kind: Format, n_out: int, n_in: int) -> int:
    return -(-n_out // GROUP) * group_bytes(kind, n_in)


def matrix_at(address: int, kind: Format, n_out: int, n_in: int, *, narrow: bool = False) -> Matrix:
    """A matrix whose packed bytes begin at `address`; whoever owns them keeps them. narrow: its inputs have 8 bits, where it has 4."""
    narrow = narrow and kind.has_four_bits
    return Matrix(address, n_out, n_in, -(-n_out // GROUP), -(-n_in // BLOCK), group_bytes(kind, n_in), kind, int(narrow))


def multiply(packed: NDArray[np.uint8], kind: Format, n_out: int, x: NDArray[np.float32], *, narrow: bool = False) -> NDArray[np.float32]:
    """packed: uint8 [matrix_bytes]. x: float32 [rows, n_in]. Returns float32 [rows, n_out]. Raises ValueError for other shapes."""
    if x.ndim != 2 or not x.shape[0] or not x.shape[1]:
        raise ValueError(f"x has shape {x.shape}; expected [rows, n_in]")
    n_rows, n_in = x.shape
    if not kind.is_float and n_in % BLOCK:
        raise ValueError(f"rows of {kind.name} are whole blocks of {BLOCK}; x has {n_in} inputs")
    if packed.dtype != np.uint8 or packed.shape != (matrix_bytes(kind, n_out, n_in),) or not packed.flags.c_contiguous:
        raise ValueError(f"a packed {kind.name} [{n_out}, {n_in}] has {matrix_bytes(kind, n_out, n_in)} bytes; got {packed.shape}")
    inputs = np.zeros((n_rows, padded(n_in, BLOCK)), np.float32)
    inputs[:, :n_in] = x
    out = np.empty((n_rows, padded(n_out, GROUP)), np.float32)
    matrix = matrix_at(packed.ctypes.data, kind, n_out, n_in, narrow=narrow)
    library().relay_multiply(ctypes.byref(matrix), n_rows, inputs.ctypes.data_as(ctypes.c_void_p), out.ctypes.data_as(ctypes.c_void_p))
    return out[:, :n_out].copy()


def read_row(packed: NDArray[np.uint8], kind: Format, n_out: int, n_in: int, row: int) -> NDArray[np.float32]:
    """Row `row` as floats: what an embedding is. Raises ValueError."""
    if not 0 <= row < n_out or packed.shape != (matrix_bytes(kind, n_out, n_in),):
        raise ValueError(f"row {row} of a packed {kind.name} [{n_out}, {n_in}] is not in {packed.shape} bytes")
    out = np.empty(padded(n_in, BLOCK), np.float32)
    matrix = matrix_at(packed.ctypes.data, kind, n_out, n_in)
    library().relay_read_row(ctypes.byref(matrix), row, out.ctypes.data_as(ctypes.c_void_p))
    return out[:n_in]


def rounded(x: NDArray[np.float32], *, narrow: bool) -> NDArray[np.float64]:
    """x: float32 [..., n_in], as integer formats see it: each block of 32 rounded to integers of its own scale."""
    top = np.float32(TOP_NARROW if narrow else TOP_WIDE)
    blocks = x.reshape(*x.shape[:-1], -1, BLOCK)
    most = np.abs(blocks).max(-1, keepdims=True)
    some = most > 1e-30
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        inverse = np.where(some, top / most, np.float32(0.0))
    scale = np.where(some, most / top, np.float32(0.0)).astype(np.float64)
    return np.asarray((np.rint(blocks * inverse) * scale).reshape(x.shape))


def reference(weights: NDArray[np.float32], x: NDArray[np.float32], *, narrow: bool = False, is_float: bool = False) -> NDArray[np.float64]:
    """weights: float32 [n_out, n_in], unpacked. The product with x as the kernel sees it, in float64."""
    inputs = x.astype(np.float64) if is_float else rounded(x, narrow=narrow)
    return np.asarray(inputs @ weights.astype(np.float64).T)
