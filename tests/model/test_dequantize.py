"""Every packed type against the dequantizers of the format's own package, bit for bit."""

import gguf
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from relay.model.checkpoint import MATRIX_TYPES
from relay.model.dequantize import dequantize
from relay.model.packed import BLOCKS, PackedMatrix

HALVES = {"Q8_0": [0], "Q4_0": [0], "Q4_1": [0, 2], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "F16": [0]}


def random_rows(kind: str, n_out: int, n_in: int) -> NDArray[np.uint8]:
    """Any bits at all, but for scales, which are finite."""
    rng = np.random.default_rng(sum(kind.encode()))
    elements, n_bytes = BLOCKS[kind]
    blocks = rng.integers(0, 256, (n_out * n_in // elements, n_bytes), dtype=np.uint8)
    for at in HALVES.get(kind, []):
        blocks[:, at : at + 2] = rng.normal(scale=0.01, size=(len(blocks), 1)).astype(np.float16).view(np.uint8)
    if kind in ("F32", "BF16"):
        values = rng.normal(size=n_out * n_in).astype(np.float32)
        blocks = (values if kind == "F32" else (values.view(np.uint32) >> 16).astype(np.uint16)).view(np.uint8)
    return blocks.reshape(n_out, -1)


@pytest.mark.parametrize("kind", MATRIX_TYPES)
def test_numbers_are_those_of_the_format(kind: str) -> None:
    rows = random_rows(kind, 37, 512)
    out = torch.full((37, 512), torch.nan)
    dequantize(PackedMatrix(kind, 512, rows), out)
    right = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind])
    assert np.array_equal(out.numpy().view(np.uint32), np.asarray(right, np.float32).view(np.uint32))
    assert np.isfinite(out.numpy()).all()
    assert len(np.unique(out.numpy())) > 100


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q6_K"])
def test_rows_may_lie_anywhere_and_come_in_any_number(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relay.model.dequantize._CHUNK_NUMBERS", 512 * 5)
    rows = random_rows(kind, 37, 512)
    shifted = np.empty(rows.size + 1, np.uint8)[1:].reshape(rows.shape)
    shifted[:] = rows
    out, right = torch.empty(37, 512), torch.empty(37, 512)
    dequantize(PackedMatrix(kind, 512, shifted), out)
    monkeypatch.undo()
    dequantize(PackedMatrix(kind, 512, rows), right)
    assert torch.equal(out, right)
