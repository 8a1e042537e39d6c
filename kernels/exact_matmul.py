"""y = x W^T + bias with a fixed order of summation: a row's bits don't depend on how many rows there are.

    x       [n_rows, n_in]              bf16 or fp16; n_in a multiple of 8
    w       [n_out, n_in]               the same type; n_out a multiple of 8
    bias    [n_out]                     the same type, or None
    out     [n_rows, n_out]             the same type, or float32

Each output is one chain of mma steps of 16 inputs in ascending order, in float32, whatever the number of rows: the shape of the tiles
rows, the chain does not. `matmul(exact=False)` is torch's own (cuBLAS), which chooses its order, and so its bits, by the shape of x:
faster for large x, outside the law of exactness. What was used is returned, for the ledger to say.
"""

from typing import Final, Literal

import numpy as np
import torch
from torch import Tensor

from relay.kernels.cuda_compiler import Program
from relay.kernels.cuda_library import CUDA, Device, Launch
from relay.kernels.tensor_check import ELEMENTS, element, expect

Method = Literal["exact", "cublas"]
PROGRAMS: Final = tuple(Program("exact_matmul", (("ELEMENT", kind),)) for kind in ELEMENTS.values())
_LAUNCH: Final = {(program.macros[0][1], rows): Launch(program, f"exact_matmul_{rows}") for program in PROGRAMS for rows in (16, 64, 128)}
_COLUMNS: Final = {16: 32, 64: 64, 128: 128}
_THREADS: Final = {16: 128, 64: 128, 128: 256}
_DEPTH: Final = {16: 128, 64: 64, 128: 64}
_STAGES: Final = {16: 4, 64: 4, 128: 3}
_GROUP: Final = 8  # row tiles that go through W together


def shared_bytes(rows: int) -> int:
    """Dynamic shared memory of a block of the shape with so many rows."""
    return _STAGES[rows] * (rows + _COLUMNS[rows]) * (_DEPTH[rows] + 8) * 2


def shape_for(n_rows: int) -> int:
    """Rows of a block's tile. Bits don't depend on it."""
    return next((rows for rows in (16, 64) if n_rows <= rows), 128)


def matmul(x: Tensor, w: Tensor, out: Tensor, *, bias: Tensor | None = None, exact: bool = True, on: Device = CUDA) -> Method:
    """Writes `out`, by this kernel or by torch's. Raises ValueError for tensors that do not fit."""
    if exact:
        exact_matmul(x, w, out, bias=bias, on=on)
        return "exact"
    out.copy_(torch.nn.functional.linear(x, w, bias))
    return "cublas"


def exact_matmul(x: Tensor, w: Tensor, out: Tensor, *, bias: Tensor | None = None, rows: int | None = None, on: Device = CUDA) -> None:
    """Writes `out`. rows: 16, 64 or 128, the shape to use. Raises ValueError for tensors that do not fit."""
    kind = element("x", x)
    expect("x", x, (None, None), x.dtype, on)
    n_rows, n_in = x.shape
    expect("w", w, (None, n_in), x.dtype, on)
    n_out = len(w)
    if bias is not None:
        expect("bias", bias, (n_out,), x.dtype, on)
    as_float = out.dtype == torch.float32
    expect("out", out, (n_rows, n_out), torch.float32 if as_float else x.dtype, on)
    if n_in % 8 or n_out % 8:
        raise ValueError(f"a matrix of {n_out} outputs and {n_in} inputs; expected multiples of 8")
    if n_rows == 0 or n_out == 0:
        return
    rows = rows or shape_for(n_rows)
    if rows not in _COLUMNS:
        raise ValueError(f"tiles of {rows} rows; expected one of {', '.join(map(str, _COLUMNS))}")
    n_tiles = -(-n_rows // rows) * -(-n_out // _COLUMNS[rows])
    arguments = (x, w, bias, out, np.int32(n_rows), np.int32(n_out), np.int32(n_in), np.int32(as_float))
    on.launch(_LAUNCH[kind, rows], (n_tiles, 1, 1), _THREADS[rows], arguments, shared_bytes(rows))


def reference(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same in float64."""
    y = x.double() @ w.double().t()
    return y if bias is None else y + bias.double()
