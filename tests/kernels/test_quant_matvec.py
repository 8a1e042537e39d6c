"""Products over packed weights, and packing, against gguf's own dequantizers and against the formulas of AWQ and GPTQ."""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray
from torch import Tensor

from relay.kernels.emulator.compiler import Mode
from relay.kernels.emulator.device import EmulatedDevice
from relay.kernels.quant_matvec import PROGRAMS, Format, Packed, quant_matvec, reference, unpacked
from relay.kernels.quant_packing import pack_awq, pack_fp8, pack_gguf, pack_gptq, pack_int8
from tests.kernels.paged import relative_error, same_bits

TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 2e-6}
PLAIN = EmulatedDevice(PROGRAMS)
WATCHED = [program for program in PROGRAMS if ("ELEMENT", "bf16") in program.macros]  # the other differs in conversions only
GGUF = {Format.Q4_0: (32, 18), Format.Q4_1: (32, 20), Format.Q4_K: (256, 144), Format.Q8_0: (32, 34)}


def gguf_rows(form: Format, n_out: int, n_in: int) -> NDArray[np.uint8]:
    """Random blocks whose fp16 scales are numbers of a usual size."""
    rng = np.random.default_rng(n_out + n_in)
    inputs, n_bytes = GGUF[form]
    blocks = rng.integers(0, 256, (n_out, n_in // inputs, n_bytes), dtype=np.uint8)
    n_halves = 2 if form in (Format.Q4_1, Format.Q4_K) else 1
    blocks[..., : 2 * n_halves] = rng.normal(0, 0.02, (n_out, n_in // inputs, n_halves)).astype(np.float16).view(np.uint8)
    return blocks.reshape(n_out, -1)


def awq(n_out: int, n_in: int, group: int) -> tuple[Packed, Tensor]:
    """Packed, and the weights by the formula."""
    g = torch.Generator().manual_seed(n_out)
    q, z = torch.randint(0, 16, (n_in, n_out), generator=g), torch.randint(0, 16, (n_in // group, n_out), generator=g)
    scales = (torch.rand(n_in // group, n_out, generator=g) * 0.05).half()

    def words(values: Tensor) -> Tensor:
        parts = values.reshape(len(values), -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]] << torch.arange(0, 32, 4)
        return parts.sum(-1).to(torch.uint32).view(torch.int32)

    weights = (q - z.repeat_interleave(group, 0)).double() * scales.double().repeat_interleave(group, 0)
    return pack_awq(words(q), words(z), scales), weights.t()


def gptq(n_out: int, n_in: int, group: int) -> tuple[Packed, Tensor]:
    g = torch.Generator().manual_seed(n_in)
    q, z = torch.randint(0, 16, (n_in, n_out), generator=g), torch.randint(1, 17, (n_in // group, n_out), generator=g)
    scales = (torch.rand(n_in // group, n_out, generator=g) * 0.05).half()
    shifts = torch.arange(0, 32, 4)
    along_k = (q.reshape(-1, 8, n_out) << shifts[:, None]).sum(1).to(torch.uint32).view(torch.int32)
    along_n = ((z - 1).reshape(len(z), -1, 8) << shifts).sum(-1).to(torch.uint32).view(torch.int32)
    weights = (q - z.repeat_interleave(group, 0)).double() * scales.double().repeat_interleave(group, 0)
    return pack_gptq(along_k, along_n, scales), weights.t()


def any_packed(form: Format, n_out: int, n_in: int) -> Packed:
    if form in GGUF:
        return pack_gguf(form, gguf_rows(form, n_out, n_in), n_in)
    if form is Format.Q4_Z:
        return awq(n_out, n_in, 128 if n_in % 128 == 0 else 64)[0]
    g = torch.Generator().manual_seed(3)
    scales = torch.rand(n_out, -(-n_in // 128), generator=g) * 0.1
    if form is Format.Q8_G:
        return pack_int8(torch.randint(-128, 128, (n_out, n_in), generator=g).to(torch.int8), scales)
    return pack_fp8((torch.randn(n_out, n_in, generator=g) * 50).to(torch.float8_e4m3fn), scales)


def inputs(n_rows: int, n_in: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(n_rows, n_in, generator=torch.Generator().manual_seed(n_rows)).to(dtype)


def product(packed: Packed, x: Tensor, *, as_float: bool = True, rows: int | None = None, on: EmulatedDevice = PLAIN) -> Tensor:
    out = torch.full((len(x), packed.n_out), float("nan"), dtype=torch.float32 if as_float else x.dtype)
    quant_matvec(packed, x, out, rows=rows, on=on)
    return out


@pytest.mark.parametrize("form", GGUF)
def test_gguf_rows_are_packed_without_rounding(form: Format) -> None:
    rows = gguf_rows(form, 40, 768)
    packed = pack_gguf(form, rows, 768)
    want = dequantize(rows, GGMLQuantizationType[form.value]).astype(np.float64)
    assert np.allclose(unpacked(packed), want, rtol=1e-6, atol=1e-9)  # theirs is rounded to float32


@pytest.mark.parametrize("group", [64, 128, 512])
def test_awq_and_gptq_are_packed_without_rounding(group: int) -> None:
    for packed, weights in (awq(48, 512, group), gptq(48, 512, group)):
        assert packed.group == group
        assert np.array_equal(unpacked(packed), weights.numpy())


def test_8_bit_weights_are_packed_without_rounding() -> None:
    g = torch.Generator().manual_seed(0)
    int8 = torch.randint(-128, 128, (40, 320), generator=g).to(torch.int8)
    by_row, by_group = torch.rand(40, generator=g), torch.rand(40, 3, generator=g)
    assert np.array_equal(unpacked(pack_int8(int8, by_row)), (int8.double() * by_row.double()[:, None]).numpy())
    wide = by_group.double().repeat_interleave(128, 1)[:, :320]
    assert np.array_equal(unpacked(pack_int8(int8, by_group)), (int8.double() * wide).numpy())
    fp8 = torch.arange(40 * 320).remainder(256).to(torch.uint8).reshape(40, 320)
    fp8[fp8 & 127 == 127] = 1
    assert np.array_equal(
        unpacked(pack_fp8(fp8.view(torch.float8_e4m3fn), by_group)), (fp8.view(torch.float8_e4m3fn).double() * wide).numpy()
    )


@pytest.mark.parametrize("form", Format)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n_rows", "n_out", "n_in"), [(0, 16, 256), (1, 16, 256), (3, 40, 768), (9, 33, 256), (33, 64, 1280)])
def test_the_product_is_one(form: Format, dtype: torch.dtype, n_rows: int, n_out: int, n_in: int) -> None:
    packed, x = any_packed(form, n_out if form is not Format.Q4_Z else 40, n_in), inputs(n_rows, n_in, dtype)
    want = reference(packed, x)
    assert relative_error(product(packed, x), want) < TOLERANCE[torch.float32]
    assert relative_error(product(packed, x, as_float=False), want) < TOLERANCE[dtype]


@pytest.mark.parametrize("form", Format)
def test_every_code_is_exact(form: Format) -> None:
    """x has a single 1 in each row: y is the weights themselves, rounded to float32 once."""
    packed = any_packed(form, 32, 256)
    for dtype in (torch.bfloat16, torch.float16):
        got = product(packed, torch.eye(256, dtype=dtype))
        assert np.allclose(got.double().numpy(), unpacked(packed).T, rtol=3e-7, atol=1e-7)


@pytest.mark.parametrize("form", [Format.Q4_K, Format.F8_G])
def test_a_rows_bits_depend_neither_on_the_batch_nor_on_the_kernel(form: Format) -> None:
    packed, x = any_packed(form, 40, 1280), inputs(40, 1280)
    whole = product(packed, x)
    for begin, end in ((0, 1), (3, 11), (5, 40), (39, 40)):
        for rows in (8, 32):
            assert same_bits(product(packed, x[begin:end].clone(), rows=rows), whole[begin:end]), (begin, end, rows)
    assert same_bits(product(packed, x, on=EmulatedDevice(PROGRAMS, seed=3)), whole)


@pytest.mark.parametrize("form", Format)
def test_a_rows_bits_do_not_depend_on_the_batch_in_any_format(form: Format) -> None:
    packed, x = any_packed(form, 24, 768), inputs(13, 768)
    whole = product(packed, x)
    for begin, end, rows in ((0, 1, 8), (12, 13, 32), (2, 11, 8), (2, 11, 32)):
        assert same_bits(product(packed, x[begin:end].clone(), rows=rows), whole[begin:end]), (begin, end, rows)


@pytest.mark.parametrize("mode", ["address", "thread"])
@pytest.mark.parametrize("form", Format)
def test_sanitizers_find_nothing(mode: Mode, form: Format) -> None:
    packed, x = any_packed(form, 40, 768), inputs(3, 768)
    assert same_bits(product(packed, x, on=EmulatedDevice(WATCHED, mode)), product(packed, x))


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"x has shape \[1, 128\]; expected \[any, 256\]"):
        product(any_packed(Format.Q4_0, 16, 256), inputs(1, 128))
    with pytest.raises(ValueError, match="whole blocks of 256"):
        pack_gguf(Format.Q4_K, gguf_rows(Format.Q4_K, 4, 256)[:, :100], 256)
    with pytest.raises(ValueError, match="expected multiples of 64"):
        pack_gguf(Format.Q4_0, gguf_rows(Format.Q4_0, 4, 96), 96)
    with pytest.raises(ValueError, match="NaN among them"):
        pack_fp8(torch.full((16, 64), torch.nan).to(torch.float8_e4m3fn), torch.ones(16))
