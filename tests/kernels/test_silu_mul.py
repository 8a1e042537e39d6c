import pytest
import torch
from torch import Tensor

from relay.kernels.emulator.compiler import Mode
from relay.kernels.emulator.device import EmulatedDevice
from relay.kernels.silu_mul import PROGRAMS, Activation, reference, silu_mul
from tests.kernels.paged import relative_error, same_bits

TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 5e-4}
PLAIN = EmulatedDevice(PROGRAMS)
WATCHED = [program for program in PROGRAMS if ("ELEMENT", "bf16") in program.macros]  # the other differs in conversions only


def rows(n: int, width: int, dtype: torch.dtype) -> Tensor:
    return (torch.randn(n, 2 * width, generator=torch.Generator().manual_seed(n + width)) * 4).to(dtype)


def gated(gate_up: Tensor, activation: Activation = "silu", on: EmulatedDevice = PLAIN) -> Tensor:
    out = torch.full((len(gate_up), gate_up.shape[1] // 2), float("nan"), dtype=gate_up.dtype)
    silu_mul(gate_up, out, activation=activation, on=on)
    return out


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "width"), [(0, 8), (1, 8), (3, 1536), (2, 2056)])
def test_the_gate_is_the_references(activation: Activation, dtype: torch.dtype, n: int, width: int) -> None:
    x = rows(n, width, dtype)
    assert relative_error(gated(x, activation), reference(x, activation=activation)) < TOLERANCE[dtype]


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_extremes_are_finite_or_as_large_as_their_input(activation: Activation) -> None:
    x = torch.tensor([[-300.0, -90.0, -1e-3, 0.0, 1e-3, 90.0, 300.0, 60000.0] + [1.0] * 8], dtype=torch.float16)
    assert torch.allclose(gated(x, activation).double(), reference(x, activation=activation), rtol=1e-3, atol=1e-6)


def test_a_row_does_not_depend_on_the_batch_nor_on_the_order_of_threads() -> None:
    x = rows(4, 2056, torch.bfloat16)
    together = gated(x, on=EmulatedDevice(PROGRAMS, seed=3))
    for i in range(4):
        assert same_bits(gated(x[i : i + 1].clone()), together[i : i + 1])


@pytest.mark.parametrize("mode", ["address", "thread"])
def test_sanitizers_find_nothing(mode: Mode) -> None:
    x = rows(2, 2056, torch.bfloat16)
    assert same_bits(gated(x, on=EmulatedDevice(WATCHED, mode)), gated(x))


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="a multiple of 8"):
        gated(rows(2, 12, torch.bfloat16))
