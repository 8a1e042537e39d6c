import pytest
import torch
from torch import Tensor

from relay.kernels.emulator.compiler import Mode
from relay.kernels.emulator.device import EmulatedDevice
from relay.kernels.rms_norm import PROGRAMS, reference, rms_norm
from tests.kernels.paged import relative_error, same_bits

TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 5e-4}
PLAIN = EmulatedDevice(PROGRAMS)
WATCHED = [program for program in PROGRAMS if ("ELEMENT", "bf16") in program.macros]  # the other differs in conversions only


def rows(n: int, width: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return (torch.randn(n, width, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


def normed(x: Tensor, residual: Tensor | None, weight: Tensor, on: EmulatedDevice = PLAIN) -> Tensor:
    out = torch.full_like(x, float("nan"))
    rms_norm(x, residual, weight, out, eps=1e-5, on=on)
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "width"), [(0, 8), (1, 8), (3, 576), (2, 2048), (2, 2056), (1, 8192)])
@pytest.mark.parametrize("fused", [False, True])
def test_norm_and_residual_are_the_references(dtype: torch.dtype, n: int, width: int, fused: bool) -> None:
    x, weight, residual = rows(n, width, dtype), rows(1, width, dtype, 1)[0], rows(n, width, dtype, 2) if fused else None
    want, summed = reference(x, residual, weight, eps=1e-5)
    got = normed(x, residual, weight)
    assert relative_error(got, want) < TOLERANCE[dtype]
    assert residual is None or same_bits(residual, summed)


@pytest.mark.parametrize("mode", ["address", "thread"])
def test_sanitizers_find_nothing(mode: Mode) -> None:
    x, weight, residual = rows(3, 2312, torch.bfloat16), rows(1, 2312, torch.bfloat16, 1)[0], rows(3, 2312, torch.bfloat16, 2)
    want = normed(x, residual.clone(), weight)
    assert same_bits(normed(x, residual, weight, EmulatedDevice(WATCHED, mode)), want)


def test_a_row_does_not_depend_on_the_batch_nor_on_the_order_of_threads() -> None:
    x, weight = rows(5, 1032, torch.bfloat16), rows(1, 1032, torch.bfloat16, 1)[0]
    together = normed(x, None, weight, EmulatedDevice(PROGRAMS, seed=3))
    for i in range(5):
        assert same_bits(normed(x[i : i + 1].clone(), None, weight), together[i : i + 1])


def test_what_does_not_fit_is_refused() -> None:
    x = rows(2, 20, torch.bfloat16)
    with pytest.raises(ValueError, match="a multiple of 8"):
        normed(x, None, x[0].clone())
    with pytest.raises(ValueError, match="residual has shape"):
        normed(rows(2, 16, torch.bfloat16), x, rows(1, 16, torch.bfloat16)[0])
