"""RMS norm of rows, fused with the residual sum before it.

    residual = residual + x          out = residual / sqrt(mean(residual^2) + eps) * weight

    x, residual, out    [n_rows, width]            bf16 or fp16, width a multiple of 8; residual changed in place, None: x itself is normed
    weight              [width]                    the same type; of families that multiply by 1 + w, 1 + w

The sum is rounded to the element's type before it is normed, so that the fused kernel gives what two would. Accumulates in float32, in an
order that depends on the width alone. Source: arXiv 1910.07467.
"""

from typing import Final

import numpy as np
from torch import Tensor

from relay.kernels.cuda_compiler import Program
from relay.kernels.cuda_library import CUDA, Device, Launch
from relay.kernels.tensor_check import ELEMENTS, element, expect

PROGRAMS: Final = tuple(Program("rms_norm", (("ELEMENT", kind),)) for kind in ELEMENTS.values())
_LAUNCH: Final = {program.macros[0][1]: Launch(program, "rms_norm") for program in PROGRAMS}
_THREADS: Final = 256


def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, out: Tensor, *, eps: float, on: Device = CUDA) -> None:
    """Writes `out` and `residual`. Raises ValueError for tensors that do not fit."""
    kind = element("x", x)
    expect("x", x, (None, None), x.dtype, on)
    n_rows, width = x.shape
    if residual is not None:
        expect("residual", residual, x.shape, x.dtype, on)
    expect("weight", weight, (width,), x.dtype, on)
    expect("out", out, x.shape, x.dtype, on)
    if width % 8:
        raise ValueError(f"rows are {width} wide; expected a multiple of 8")
    if n_rows:
        on.launch(_LAUNCH[kind], (n_rows, 1, 1), _THREADS, (x, residual, weight, out, np.int32(width), np.float32(eps)))


def reference(x: Tensor, residual: Tensor | None, weight: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
    """(out in float64, the new residual, or x)."""
    summed = x if residual is None else (residual.float() + x.float()).to(x.dtype)
    wide = summed.double()
    return wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double(), summed
