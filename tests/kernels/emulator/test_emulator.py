"""The emulator reports what it must, and nothing else."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from relay.kernels.cuda_compiler import Program
from relay.kernels.cuda_library import Launch
from relay.kernels.emulator.compiler import Mode
from relay.kernels.emulator.device import EmulatedDevice, EmulatorError

PROGRAMS = tuple(Program("misuse", (("ELEMENT", kind),)) for kind in ("bf16", "fp16"))
SOURCE = Path(__file__).parent / "misuse.cu"


def run(
    kernel: str, arguments: Sequence[Any], *, blocks: int = 1, threads: int = 64, shared: int = 0, mode: Mode = "plain", kind: int = 0
) -> None:
    device = EmulatedDevice(PROGRAMS, mode, source=SOURCE)
    device.launch(Launch(PROGRAMS[kind], kernel), (blocks, 1, 1), threads, arguments, shared)


def zeros(n: int = 64) -> Tensor:
    return torch.zeros(n, dtype=torch.int32)


@pytest.mark.parametrize(
    ("kernel", "options", "message"),
    [
        ("barrier_on_two_lines", {"threads": 32}, "barrier reached at different lines"),
        ("ends_while_awaited", {}, "a thread ends while|names a lane that has ended"),
        ("lane_outside_its_mask", {}, "not in its own mask"),
        ("shuffle_from_outside", {}, "reads a lane outside its mask"),
        ("missing_barrier", {"mode": "thread"}, "data race"),
        ("writes_from_two_blocks", {"blocks": 2, "threads": 1, "mode": "thread"}, "data race"),
        ("reads_past_the_end", {"mode": "address"}, "heap-buffer-overflow"),
        ("shared_past_the_end", {"mode": "address", "shared": 252}, "heap-buffer-overflow"),
        ("shifts_too_far", {"mode": "address"}, "shift exponent"),
        ("misaligned_copy", {"shared": 16, "threads": 1}, "not aligned to 16 bytes"),
        ("copy_in_flight_at_the_end", {"shared": 1024}, "copies in flight"),
        ("rows_in_one_bank", {"shared": 4096, "threads": 32}, "the same banks"),
        ("never_wrong", {"shared": 300 << 10}, "227 KiB"),
        ("never_wrong", {"threads": 1025}, "1 to 1024 threads"),
        ("no_such_kernel", {}, "no such kernel"),
    ],
)
def test_a_mistake_is_reported(kernel: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(EmulatorError, match=message):
        run(kernel, (zeros(),), **options)


def test_a_launch_with_another_number_of_arguments_is_refused() -> None:
    with pytest.raises(EmulatorError, match="another number of arguments"):
        run("never_wrong", (zeros(), zeros()))


def test_what_nobody_wrote_is_read_as_all_ones() -> None:
    out = zeros()
    run("missing_barrier", (out,))
    assert out[0] == -1


def test_a_copy_that_was_not_waited_for_is_read_as_all_ones() -> None:
    out = zeros()
    run("missing_wait", (out,), shared=1024)
    assert (out == -1).all()


@pytest.mark.parametrize("mode", ["plain", "address", "thread"])
def test_a_kernel_without_mistakes_is_not_reported(mode: Mode) -> None:
    out = zeros()
    run("never_wrong", (out,), mode=mode)
    assert (out == 63).all()


def test_sixteen_bit_floats_are_torchs() -> None:
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31 - 1, (200_000,), generator=generator).int().view(torch.float32)
    normal = torch.randn(60_000, generator=generator)
    edges = torch.tensor([0.0, -0.0, 65504.0, 65519.0, 65520.0, 1e9, torch.inf, 2.0**-24, 2.0**-25, 1.5 * 2.0**-25, 6.1e-5, 3.39e38])
    f = torch.cat((bits[bits.isfinite()], normal, normal * 1e-6, normal * 1e-4, edges, -edges))
    n = len(f)
    b, h, fb, fh = torch.zeros(n, dtype=torch.int32), torch.zeros(n, dtype=torch.int32), torch.zeros(n), torch.zeros(n)
    run("round_trip", (f, b, h, fb, fh, np.int32(n)), blocks=-(-n // 64))
    assert torch.equal(b.to(torch.int16), f.bfloat16().view(torch.int16))
    assert torch.equal(h.to(torch.int16), f.half().view(torch.int16))
    assert torch.equal(fb, f.bfloat16().float())
    assert torch.equal(fh, f.half().float())


@pytest.mark.parametrize("kind", [0, 1])
def test_a_matrix_product_is_one(kind: int) -> None:
    generator = torch.Generator().manual_seed(1)
    dtype = (torch.bfloat16, torch.float16)[kind]
    a, b = torch.randn(16, 16, generator=generator).to(dtype), torch.randn(8, 16, generator=generator).to(dtype)
    c = torch.zeros(16, 8)
    run("one_product", (a.view(torch.int32), b.view(torch.int32), c), threads=32, kind=kind)
    assert torch.allclose(c.double(), a.double() @ b.double().t(), rtol=0, atol=1e-5)
