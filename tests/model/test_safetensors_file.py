"""One safetensors file against the format's own writer, and headers that lie."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from relay.errors import ModelError
from relay.model.safetensors_file import SafetensorsFile


def write(path: Path, header: Any, data: bytes = bytes(8)) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return path


def entry(shape: Any = (2,), begin: Any = 0, end: Any = 8, dtype: Any = "F32", **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape) if isinstance(shape, tuple) else shape, "data_offsets": [begin, end], **more}


def test_what_the_package_writes_is_read_byte_for_byte(tmp_path: Path) -> None:
    tensors = {
        "a.weight": torch.randn(3, 4).bfloat16(),
        "b": torch.randn(5).half(),
        "c": torch.randn(2, 2, 2),
        "empty": torch.empty(0, 4),
        "f8": torch.randn(4).to(torch.float8_e4m3fn),
    }
    safetensors.torch.save_file(tensors, tmp_path / "m.safetensors", metadata={"format": "pt"})
    file = SafetensorsFile(tmp_path / "m.safetensors")
    found = {name: (info.type, info.shape) for name, info in file.infos().items()}
    assert found == {
        "a.weight": ("BF16", (3, 4)),
        "b": ("F16", (5,)),
        "c": ("F32", (2, 2, 2)),
        "empty": ("F32", (0, 4)),
        "f8": ("F8_E4M3", (4,)),
    }
    for name, tensor in tensors.items():
        assert file.data(name).tobytes() == tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.numel() else True


@pytest.mark.parametrize(
    ("header", "data", "says"),
    [
        (b"", b"", "its header cannot be read"),
        (b"{", bytes(8), "its header cannot be read"),
        (b"[1]", bytes(8), "its header cannot be read"),
        (b"[" * 100000, bytes(8), "its header cannot be read"),
        (b'{"a":' + b"[" * 100000, bytes(8), "its header cannot be read"),
        (b'{"\xff": 1}', bytes(8), "its header cannot be read"),
        ({"a": 1}, bytes(8), "the tensor 'a' cannot be read"),
        ({"a": {"dtype": "F32"}}, bytes(8), "the tensor 'a' cannot be read"),
        ({"a": entry(shape=(-2,))}, bytes(8), "the tensor 'a' cannot be read"),
        ({"a": entry(shape=(2.5,))}, bytes(8), "the tensor 'a' cannot be read"),
        ({"a": entry(shape=(True, 2))}, bytes(8), "the tensor 'a' cannot be read"),
        ({"a": entry(shape="2")}, bytes(8), "the tensor 'a' cannot be read"),
        ({"a": entry(shape=(1,) * 17)}, bytes(8), "the tensor 'a' cannot be read"),
        ({"a": entry(shape=(10**30,))}, bytes(8), "the tensor 'a' cannot be read"),
        ({"a": entry(begin=-8, end=0)}, bytes(8), "the tensor 'a' cannot be read"),
        ({"a": entry(begin=8, end=0)}, bytes(8), "has -8 bytes, not 8"),
        ({"a": entry(end=1 << 62, shape=(1 << 60,))}, bytes(8), "8 follow the header"),
        ({"a": entry(shape=(1 << 40, 1 << 40))}, bytes(8), "has 8 bytes"),
        ({"a": entry(dtype="Q4_K")}, bytes(8), "'Q4_K', which is not known"),
        ({"a": entry(dtype=None)}, bytes(8), "the tensor 'a' cannot be read"),
        ({"a": entry(), "b": entry()}, bytes(8), "the tensor 'b' begins at byte 0 of the data, and the one before it ends at 8"),
        ({"a": entry(begin=4, end=12)}, bytes(12), "begins at byte 4"),
        ({"a": entry()}, bytes(7), "7 follow the header"),
        ({"a": entry()}, bytes(9), "9 follow the header"),
        ({"a" * 10000: 1}, bytes(8), r"aaa\.\.\.'"),
        ({"\x1b[31m\n": 1}, bytes(8), r"\\x1b"),
    ],
)
def test_a_header_that_lies_is_a_model_error(tmp_path: Path, header: Any, data: bytes, says: str) -> None:
    path = write(tmp_path / "m.safetensors", header, data)
    with pytest.raises(ModelError, match=says) as refused:
        SafetensorsFile(path)
    assert str(path) in str(refused.value)
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize("content", [b"", b"1234567", struct.pack("<Q", 1 << 63), struct.pack("<Q", 9) + b"{}      ", bytes(100)])
def test_a_file_that_is_cut_short_is_a_model_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m.safetensors").write_bytes(content)
    with pytest.raises(ModelError):
        SafetensorsFile(tmp_path / "m.safetensors")
    with pytest.raises(ModelError, match="cannot be read"):
        SafetensorsFile(tmp_path / "none.safetensors")


@settings(max_examples=300, deadline=None)
@given(flips=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=4), cut=st.integers(0, 600))
def test_no_damage_raises_anything_else(tmp_path_factory: pytest.TempPathFactory, flips: list[tuple[int, int]], cut: int) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    arrays: dict[str, np.ndarray[Any, Any]] = {"model.layers.0.weight": np.ones((3, 4), np.float32), "b": np.ones(5, np.float16)}
    data = bytearray(safetensors.numpy.save(arrays, metadata={"format": "pt"}))
    for at, byte in flips:
        data[at % len(data)] = byte
    path.write_bytes(bytes(data[: len(data) - cut % len(data)] if cut % 3 == 0 else data))
    try:
        file = SafetensorsFile(path)
    except ModelError:
        return
    for name in file.infos():
        file.data(name)
