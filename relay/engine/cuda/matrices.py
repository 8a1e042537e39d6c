"""Weights on a device: dense in the step's type, or packed as the file has them where a kernel computes with that.

A `Product` is what reads one input: q, k and v together, or gate and up. Parts of one type become one matrix; parts of several stay apart,
and their results are put side by side.
"""

from collections.abc import Sequence
from typing import Final, Protocol

import numpy as np
import torch
from torch import Tensor

from relay.engine.cuda.matrix_types import packs
from relay.errors import ModelError
from relay.kernels.device_runtime import Runtime
from relay.kernels.exact_matmul import matmul
from relay.kernels.quant_matvec import Format, Packed, quant_matvec
from relay.kernels.quant_packing import pack_gguf
from relay.model.checkpoint import Checkpoint
from relay.model.dequantize import dequantize
from relay.model.packed import PackedMatrix

_OUTPUTS: Final = 8  # a matrix has a multiple of them


class Matrix(Protocol):
    """y = x W^T. x: [n_rows, n_in]; out: [n_rows, n_out], of the same type or float32. exact: a row's bits don't depend on n_rows."""

    n_out: int
    exact: bool

    def multiply(self, x: Tensor, out: Tensor) -> None: ...


class DenseMatrix:
    """weight: [n_out, n_in] on the device."""

    def __init__(self, weight: Tensor, bias: Tensor | None, runtime: Runtime, *, exact: bool) -> None:
        self.weight, self.n_out = weight, len(weight)
        self._bias, self._runtime, self.exact = bias, runtime, exact

    def multiply(self, x: Tensor, out: Tensor) -> None:
        if self.exact:
            matmul(x, self.weight, out, bias=self._bias, on=self._runtime.on)
        else:
            self._runtime.call(lambda: matmul(x, self.weight, out, bias=self._bias, exact=False, on=self._runtime.on))


class QuantizedMatrix:
    exact = True

    def __init__(self, packed: Packed, bias: Tensor | None, runtime: Runtime) -> None:
        self.n_out = packed.n_out
        self._packed, self._bias, self._runtime = packed, bias, runtime

    def multiply(self, x: Tensor, out: Tensor) -> None:
        quant_matvec(self._packed, x, out, on=self._runtime.on)
        bias = self._bias
        if bias is not None:
            self._runtime.call(lambda: out.add_(bias))


class Product:
    """Several matrices of one input as one; `scratch`: flat, of the step's type, for as many rows as a step has."""

    def __init__(self, parts: Sequence[Matrix], scratch: Tensor, runtime: Runtime) -> None:
        self.parts, self.n_out = tuple(parts), sum(part.n_out for part in parts)
        self._scratch, self._runtime = scratch, runtime

    def multiply(self, x: Tensor, out: Tensor) -> None:
        if len(self.parts) == 1:
            self.parts[0].multiply(x, out)
            return
        begin = 0
        for part in self.parts:
            one = self._scratch[: len(x) * part.n_out].view(len(x), part.n_out)
            part.multiply(x, one)
            self.place(one, out[:, begin : begin + part.n_out])
            begin += part.n_out

    def place(self, part: Tensor, columns: Tensor) -> None:
        self._runtime.call(lambda: columns.copy_(part))


class MatrixLoader:
    """Reads matrices of a checkpoint onto the device, in `dtype` or as the file has them."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, runtime: Runtime, *, exact: bool) -> None:
        self._checkpoint, self._dtype, self._runtime, self._exact = checkpoint, dtype, runtime, exact
        self._names = frozenset(checkpoint.names)

    def vector(self, name: str) -> Tensor | None:
        """In the step's type; None where the model has none."""
        if name not in self._names:
            return None
        return torch.from_numpy(self._checkpoint.vector(name)).to(self._dtype).to(self._runtime.place)

    def dense(self, *names: str) -> Tensor:
        """[n_out, n_in], several on top of each other."""
        rows = torch.cat([self._dense_rows(self._checkpoint.matrix(name)) for name in names])
        return rows.to(self._runtime.place)

    def parts(self, names: Sequence[str], *, apart: bool = False) -> list[Matrix]:
        """One matrix of all where they are of one type, else, or if `apart`, one of each."""
        kinds = {self._kind(name) for name in names}
        if len(kinds) > 1 or (apart and len(names) > 1):
            return [matrix for name in names for matrix in self.parts([name])]
        kind, bias = kinds.pop(), self._bias(names)
        for name in names:
            if self._checkpoint.shape(name)[0] % _OUTPUTS:
                raise ModelError(f"`{name}` has {self._checkpoint.shape(name)[0]} outputs; the CUDA kernels need multiples of {_OUTPUTS}")
        if kind is None:
            return [DenseMatrix(self.dense(*names), bias, self._runtime, exact=self._exact)]
        found = [self._checkpoint.matrix(name) for name in names]
        packed = pack_gguf(Format(kind), np.concatenate([matrix.rows for matrix in found]), found[0].n_in)
        return [QuantizedMatrix(packed.to(self._runtime.place), bias, self._runtime)]

    def _kind(self, name: str) -> str | None:
        kind = self._checkpoint.type(name)
        return kind if packs(kind, self._checkpoint.shape(name)[1]) else None

    def _bias(self, names: Sequence[str]) -> Tensor | None:
        found = [self.vector(f"{name}_bias") for name in names]
        there = [bias for bias in found if bias is not None]
        return torch.cat(there) if there else None

    def _dense_rows(self, matrix: PackedMatrix) -> Tensor:
        if matrix.type == "BF16" and self._dtype == torch.bfloat16:
            return torch.from_numpy(np.ascontiguousarray(matrix.rows)).view(torch.bfloat16)
        wide = torch.empty(matrix.n_out, matrix.n_in)
        dequantize(matrix, wide)
        return wide.to(self._dtype)
