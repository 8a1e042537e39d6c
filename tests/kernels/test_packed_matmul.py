"""Products with packed weights against float64, for every format, odd shapes and numbers of rows."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from relay.kernels.packed_matmul import Format, group_bytes, matrix_bytes, multiply, padded, read_row, reference, rounded
from relay.kernels.weight_packing import pack
from relay.model.dequantize import dequantize
from relay.model.packed import PackedMatrix
from tests.engine.native_models import packed_rows

SHAPES = ((1, 32), (16, 256), (37, 96), (48, 512), (33, 1536), (17, 2304))
FLOAT_SHAPES = ((5, 1), (16, 33), (50, 100))


def matrix(kind: Format, n_out: int, n_in: int, seed: int = 0) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Packed, and unpacked by the reference's own reading of the file format."""
    rng = np.random.default_rng(seed)
    rows = packed_rows(kind.name, rng.standard_normal((n_out, n_in)).astype(np.float32), rng)
    packed = np.full(matrix_bytes(kind, n_out, n_in), 0xAA, np.uint8)
    pack(kind, rows, n_in, packed)
    out = torch.empty(n_out, n_in)
    dequantize(PackedMatrix(kind.name, n_in, rows), out)
    return packed, out.numpy()


def inputs(n_rows: int, n_in: int, seed: int = 1) -> NDArray[np.float32]:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((n_rows, n_in)) * np.exp(rng.standard_normal((n_rows, n_in)))).astype(np.float32)


def shapes_of(kind: Format) -> list[tuple[int, int]]:
    whole = 256 if kind.name.endswith("_K") else 32
    return [shape for shape in SHAPES if shape[1] % whole == 0] + (list(FLOAT_SHAPES) if kind.is_float else [])


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("kind", Format)
def test_products_are_those_of_the_numbers_in_the_file(kind: Format, narrow: bool) -> None:
    for n_out, n_in in shapes_of(kind):
        packed, weights = matrix(kind, n_out, n_in)
        x = inputs(37, n_in)
        found = multiply(packed, kind, n_out, x, narrow=narrow)
        expected = reference(weights, x, narrow=narrow and kind.has_four_bits, is_float=kind.is_float)
        scale = np.abs(x) @ np.abs(weights).T
        assert (np.abs(found - expected) <= 2e-6 * scale + 1e-30).all(), (n_out, n_in)


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("kind", Format)
def test_a_row_has_the_same_bits_beside_any_others(kind: Format, narrow: bool) -> None:
    n_in = 768
    packed, _ = matrix(kind, 70, n_in)
    x = inputs(40, n_in)
    alone = np.concatenate([multiply(packed, kind, 70, x[i : i + 1], narrow=narrow) for i in range(40)])
    rng = np.random.default_rng(2)
    for n_rows in (2, 3, 4, 5, 7, 8, 11, 16, 31, 40):
        chosen = rng.permutation(40)[:n_rows]
        together = multiply(packed, kind, 70, x[chosen], narrow=narrow)
        assert np.array_equal(together.view(np.uint32), alone[chosen].view(np.uint32)), n_rows


def test_inputs_are_rounded_to_their_own_blocks() -> None:
    x = inputs(3, 96)
    x[1, 32:64] = 0.0
    x[2, :32] = 1e-38
    for narrow, steps in ((False, 32512), (True, 127)):
        error = np.abs(rounded(x, narrow=narrow) - x).reshape(3, 3, 32).max(-1)
        most = np.abs(x).reshape(3, 3, 32).max(-1)
        assert (error <= most / steps * 0.501 + 1e-30).all()


@pytest.mark.parametrize("kind", Format)
def test_a_row_reads_back_as_its_numbers(kind: Format) -> None:
    n_in = 512
    packed, weights = matrix(kind, 37, n_in)
    for row in (0, 15, 16, 36):
        assert read_row(packed, kind, 37, n_in, row) == pytest.approx(weights[row], rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("kind", [Format.Q4_0, Format.Q4_1, Format.Q4_K, Format.Q8_0, Format.Q6_K])
def test_the_largest_numbers_do_not_overflow(kind: Format) -> None:
    """All quants at their extremes, all inputs at the top of their range: sums of products are largest."""
    n_in = 256
    for value in (0x00, 0x7F, 0x80, 0xFF):
        rng = np.random.default_rng(0)
        rows = packed_rows(kind.name, rng.standard_normal((16, n_in)).astype(np.float32), rng).copy()
        quants = {"Q4_0": (18, 2, 18), "Q4_1": (20, 4, 20), "Q8_0": (34, 2, 34), "Q4_K": (144, 16, 144), "Q6_K": (210, 0, 208)}[kind.name]
        blocks = rows.reshape(-1, quants[0])
        blocks[:, quants[1] : quants[2]] = value
        packed = np.empty(matrix_bytes(kind, 16, n_in), np.uint8)
        pack(kind, rows, n_in, packed)
        weights = torch.empty(16, n_in)
        dequantize(PackedMatrix(kind.name, n_in, rows), weights)
        for signs in (1.0, -1.0):
            x = np.full((5, n_in), signs, np.float32)
            for narrow in (False, True):
                found = multiply(packed, kind, 16, x, narrow=narrow)
                expected = reference(weights.numpy(), x, narrow=narrow and kind.has_four_bits)
                assert found == pytest.approx(expected, rel=1e-5, abs=1e-4)


def test_sizes_are_what_the_kernels_say() -> None:
    for kind in Format:
        assert group_bytes(kind, 512) % 64 == 0
        assert matrix_bytes(kind, 17, 512) == 2 * group_bytes(kind, 512)
    assert padded(17, 16) == 32
    assert group_bytes(Format.Q4_1, 576) == 18 * 320
    assert group_bytes(Format.Q8_0, 576) == 18 * 544 // 64 * 64


WRONG: tuple[tuple[dict[str, Any], str], ...] = (
    ({"x": np.zeros((2, 33), np.float32)}, "whole blocks"),
    ({"x": np.zeros(32, np.float32)}, "rows, n_in"),
    ({"x": np.zeros((0, 32), np.float32)}, "rows, n_in"),
    ({"n_out": 17}, "has 1280 bytes"),
    ({"packed": np.zeros(320, np.int8)}, "bytes"),
    ({"packed": np.zeros(640, np.uint8)[::2]}, "bytes"),
)


@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_shapes_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"packed": np.zeros(640, np.uint8), "n_out": 16, "x": np.zeros((2, 64), np.float32), **changes}
    if changes.get("n_out") != 17:
        arguments["packed"] = changes.get("packed", np.zeros(640, np.uint8))
    with pytest.raises(ValueError, match=message):
        multiply(arguments["packed"], Format.Q4_1, arguments["n_out"], arguments["x"])


def test_packing_takes_whole_rows_and_known_groups_only() -> None:
    rows, to = np.zeros((20, 20), np.uint8), np.zeros(640, np.uint8)
    pack(Format.Q4_1, rows, 32, to)
    for wrong, message in (
        ({"rows": rows[:, :19]}, "are uint8"),
        ({"rows": rows[:, ::2]}, "are uint8"),
        ({"n_in": 33}, "whole blocks"),
        ({"to": to[:320]}, "has 640 bytes"),
        ({"first": 1, "n": 2}, "are not among 2"),
        ({"first": -1}, "are not among 2"),
    ):
        given: dict[str, Any] = {"rows": rows, "n_in": 32, "to": to, **wrong}
        with pytest.raises(ValueError, match=message):
            pack(Format.Q4_1, given.pop("rows"), given.pop("n_in"), given.pop("to"), **given)
