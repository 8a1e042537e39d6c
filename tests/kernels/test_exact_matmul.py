from typing import Any

import pytest
import torch
from torch import Tensor

from relay.kernels.emulator.compiler import Mode
from relay.kernels.emulator.device import EmulatedDevice
from relay.kernels.exact_matmul import PROGRAMS, exact_matmul, matmul, reference, shape_for
from tests.kernels.paged import relative_error, same_bits

TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 1e-6}
PLAIN = EmulatedDevice(PROGRAMS)
WATCHED = [program for program in PROGRAMS if ("ELEMENT", "bf16") in program.macros]  # the other differs in conversions only


def matrix(n: int, n_in: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(n, n_in, generator=torch.Generator().manual_seed(seed + n)).to(dtype)


def product(x: Tensor, w: Tensor, *, as_float: bool = False, on: EmulatedDevice = PLAIN, **options: Any) -> Tensor:
    out = torch.full((len(x), len(w)), float("nan"), dtype=torch.float32 if as_float else x.dtype)
    exact_matmul(x, w, out, on=on, **options)
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("as_float", [False, True])
@pytest.mark.parametrize(
    ("n_rows", "n_out", "n_in"), [(0, 8, 8), (1, 8, 8), (3, 40, 200), (17, 72, 136), (64, 64, 64), (70, 136, 72), (130, 264, 40)]
)
def test_the_product_is_one(dtype: torch.dtype, as_float: bool, n_rows: int, n_out: int, n_in: int) -> None:
    x, w, bias = matrix(n_rows, n_in, dtype), matrix(n_out, n_in, dtype, 1), matrix(1, n_out, dtype, 2)[0]
    got = product(x, w, as_float=as_float, bias=bias)
    assert relative_error(got, reference(x, w, bias)) < TOLERANCE[got.dtype]


def test_a_rows_bits_do_not_depend_on_the_number_of_rows_nor_on_the_shape() -> None:
    x, w = matrix(150, 328), matrix(40, 328, seed=1)
    whole = product(x, w, as_float=True)
    assert {shape_for(n) for n in (1, 16, 17, 64, 65, 150)} == {16, 64, 128}
    for begin, end in ((0, 1), (7, 23), (20, 81), (100, 150), (149, 150)):
        assert same_bits(product(x[begin:end].clone(), w, as_float=True), whole[begin:end]), (begin, end)
    for rows in (16, 64):
        assert same_bits(product(x, w, as_float=True, rows=rows), whole), rows


@pytest.mark.parametrize("mode", ["address", "thread"])
@pytest.mark.parametrize("rows", [16, 64, 128])
def test_sanitizers_find_nothing(mode: Mode, rows: int) -> None:
    x, w = matrix(18, 264), matrix(40, 264, seed=1)
    assert same_bits(product(x, w, rows=rows, on=EmulatedDevice(WATCHED, mode)), product(x, w))


@pytest.mark.parametrize("seed", [1, 2])
def test_the_order_of_threads_and_blocks_changes_nothing(seed: int) -> None:
    x, w = matrix(70, 264), matrix(72, 264, seed=1)
    assert same_bits(product(x, w, on=EmulatedDevice(PROGRAMS, seed=seed)), product(x, w))


def test_torchs_own_is_used_when_asked_for_and_said() -> None:
    x, w = matrix(4, 64), matrix(16, 64, seed=1)
    out = torch.empty(4, 16, dtype=torch.bfloat16)
    assert matmul(x, w, out, exact=True, on=PLAIN) == "exact"
    assert same_bits(out, product(x, w))
    assert matmul(x, w, out, exact=False, on=PLAIN) == "cublas"
    assert relative_error(out, reference(x, w)) < TOLERANCE[torch.bfloat16]


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="expected multiples of 8"):
        product(matrix(2, 12), matrix(8, 12))
    with pytest.raises(ValueError, match=r"w has shape \[8, 16\]; expected \[any, 24\]"):
        product(matrix(2, 24), matrix(8, 16))
