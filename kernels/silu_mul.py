"""The gate of a gated network.

    out = activation(gate) * up          silu(x) = x / (1 + e^-x)          gelu_tanh(x) = x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2

    gate_up     [n_rows, 2 * width]            bf16 or fp16, gate then up; width a multiple of 8
    out         [n_rows, width]                the same type

Source: arXiv 2002.05202.
"""

from typing import Final, Literal

import numpy as np
import torch
from torch import Tensor

from relay.kernels.cuda_compiler import Program
from relay.kernels.cuda_library import CUDA, Device, Launch
from relay.kernels.tensor_check import ELEMENTS, element, expect

Activation = Literal["silu", "gelu_tanh"]
_ACTIVATIONS: Final[tuple[Activation, ...]] = ("silu", "gelu_tanh")
_PROGRAMS: Final = {
    (kind, activation): Program("silu_mul", (("ELEMENT", kind), ("ACTIVATION", activation)))
    for kind in ELEMENTS.values()
    for activation in _ACTIVATIONS
}
PROGRAMS: Final = tuple(_PROGRAMS.values())
_LAUNCH: Final = {key: Launch(program, "silu_mul") for key, program in _PROGRAMS.items()}
_THREADS: Final = 256
_MOST_ROWS: Final = 65535


def silu_mul(gate_up: Tensor, out: Tensor, *, activation: Activation = "silu", on: Device = CUDA) -> None:
    """Writes `out`. Raises ValueError for tensors that do not fit."""
    kind = element("gate_up", gate_up)
    expect("out", out, (None, None), gate_up.dtype, on)
    n_rows, width = out.shape
    expect("gate_up", gate_up, (n_rows, 2 * width), gate_up.dtype, on)
    if width % 8 or n_rows > _MOST_ROWS:
        raise ValueError(f"{n_rows} rows of width {width}; expected a multiple of 8, and at most {_MOST_ROWS} rows")
    if activation not in _ACTIVATIONS:
        raise ValueError(f"activation {activation}; expected one of {', '.join(_ACTIVATIONS)}")
    if n_rows:
        on.launch(_LAUNCH[kind, activation], (-(-width // (8 * _THREADS)), n_rows, 1), _THREADS, (gate_up, out, np.int32(width)))


def reference(gate_up: Tensor, *, activation: Activation = "silu") -> Tensor:
    """The same in float64."""
    gate, up = gate_up.double().chunk(2, -1)
    return (torch.nn.functional.silu(gate) if activation == "silu" else torch.nn.functional.gelu(gate, approximate="tanh")) * up
