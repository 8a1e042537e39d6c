"""What a launcher asks of its tensors before it hands their addresses to a kernel: what is wrong, and what was expected."""

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from relay.kernels.cuda_library import Device

ELEMENTS: Final = {torch.bfloat16: "bf16", torch.float16: "fp16"}
ALIGNMENT: Final = 16


def expect(name: str, tensor: Tensor, shape: Sequence[int | None], dtype: torch.dtype, on: Device) -> None:
    """None in `shape` is any size. Raises ValueError."""
    if tensor.dtype != dtype:
        raise ValueError(f"{name} is {tensor.dtype}; expected {dtype}")
    if tensor.dim() != len(shape) or any(want is not None and want != n for want, n in zip(shape, tensor.shape, strict=True)):
        wanted = ", ".join("any" if n is None else str(n) for n in shape)
        raise ValueError(f"{name} has shape {list(tensor.shape)}; expected [{wanted}]")
    if tensor.device.type != on.type:
        raise ValueError(f"{name} is on {tensor.device}; expected it on {on.type}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} has strides {tensor.stride()}; expected it contiguous: call .contiguous() where it is made")
    if tensor.data_ptr() % ALIGNMENT:
        raise ValueError(
            f"{name} lies at an address that is no multiple of {ALIGNMENT}; expected one: don't pass a slice that begins inside"
        )


def element(name: str, tensor: Tensor) -> str:
    """bf16 or fp16, as the kernels call it. Raises ValueError."""
    if tensor.dtype not in ELEMENTS:
        raise ValueError(f"{name} is {tensor.dtype}; expected torch.bfloat16 or torch.float16")
    return ELEMENTS[tensor.dtype]


def shift_of(name: str, n: int) -> int:
    """log2 of a power of two. Raises ValueError."""
    if n < 1 or n & (n - 1):
        raise ValueError(f"{name} is {n}; expected a power of two")
    return n.bit_length() - 1
