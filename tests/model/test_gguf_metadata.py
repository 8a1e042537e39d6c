"""The GGUF header reader: against the gguf package's own writer and reader, and against damaged files."""

import random
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from relay.errors import ModelError
from relay.model import gguf_metadata
from relay.model.gguf_metadata import GGUFHeader, TensorInfo, read_metadata


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A small file with every kind of value, written by the gguf package."""
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("a.u8", 200)
    writer.add_int8("a.i8", -3)
    writer.add_uint16("a.u16", 60000)
    writer.add_int16("a.i16", -30000)
    writer.add_uint32("a.u32", 1 << 31)
    writer.add_int32("a.i32", -5)
    writer.add_uint64("a.u64", 1 << 63)
    writer.add_int64("a.i64", -(1 << 62))
    writer.add_float32("a.f32", 0.5)
    writer.add_float64("a.f64", 0.1)
    writer.add_bool("a.bool", True)
    writer.add_string("a.string", "héllo")
    writer.add_array("a.strings", ["x", "", "日本"])
    writer.add_array("a.ints", [1, -2, 3])
    writer.add_array("a.bools", [True, False])
    writer.add_tensor("one", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("two", np.zeros((5, 40), dtype=np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def read(tmp_path: Path, data: bytes) -> GGUFHeader:
    path = tmp_path / "file.gguf"
    path.write_bytes(data)
    return read_metadata(path)


def header(n_tensors: int = 0, n_keys: int = 0, *parts: bytes, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, n_tensors, n_keys) + b"".join(parts)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def tensor(name: str, shape: list[int], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def test_every_kind_of_value_is_read(tmp_path: Path, small: bytes) -> None:
    found = read(tmp_path, small)
    expected: dict[str, Any] = {
        "general.architecture": "llama",
        "a.u8": 200,
        "a.i8": -3,
        "a.u16": 60000,
        "a.i16": -30000,
        "a.u32": 1 << 31,
        "a.i32": -5,
        "a.u64": 1 << 63,
        "a.i64": -(1 << 62),
        "a.f32": 0.5,
        "a.f64": 0.1,
        "a.bool": True,
        "a.string": "héllo",
        "a.strings": ["x", "", "日本"],
        "a.ints": [1, -2, 3],
        "a.bools": [True, False],
    }
    assert found.metadata == expected
    assert type(found.metadata["a.bool"]) is bool
    one, two = found.tensors["one"], found.tensors["two"]
    assert one == TensorInfo(name="one", shape=(2, 3), type="F32", offset=found.data_offset, n_bytes=24)
    assert two == TensorInfo(name="two", shape=(5, 64), type="Q4_1", offset=found.data_offset + 32, n_bytes=200)
    assert small[one.offset : one.offset + 24] == np.arange(6, dtype=np.float32).tobytes()


def test_the_real_file_is_read_whole(smollm2_path: Path) -> None:
    found = read_metadata(smollm2_path)
    assert len(found.metadata) == 33
    assert (found.version, found.alignment, found.data_offset) == (3, 32, 1785664)
    assert found.metadata["llama.rope.freq_base"] == 100000.0
    assert len(found.metadata["tokenizer.ggml.tokens"]) == 49152
    assert len(found.metadata["tokenizer.ggml.merges"]) == 48900
    assert len(found.tensors) == 272
    assert {tensor.type for tensor in found.tensors.values()} == {"F32", "Q4_1", "Q8_0"}
    end = max(tensor.offset + tensor.n_bytes for tensor in found.tensors.values())
    assert end == smollm2_path.stat().st_size
    assert found.tensors["token_embd.weight"].shape == (49152, 576)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "empty"),
        (b"GG", "begins with b'GG'"),
        (b"PK\x03\x04" + bytes(40), "begins with b'PK"),
        (b"GGUF", "the version needs 4 bytes"),
        (header(version=1), "version is 1"),
        (header(version=3 << 24), "big-endian"),
        (header(0, 1 << 63), "metadata key 0"),
        (header(1 << 63, 0), "the name of tensor 0"),
        (header(0, 1, struct.pack("<Q", 1 << 63)), "the most is 65535"),
        (header(0, 1, text("k"), struct.pack("<I", 99), bytes(8)), "value type 99"),
        (header(0, 1, text("k"), struct.pack("<IQ", 8, 1 << 40)), "the most is 16777216"),
        (header(0, 1, text("k"), struct.pack("<IQ", 8, 2), b"\xff\xfe"), "not UTF-8"),
        (header(0, 1, text("k"), struct.pack("<IIQ", 9, 4, 1 << 62)), "the most in all arrays"),
        (header(0, 1, text("k"), struct.pack("<IIQ", 9, 4, 1000)), "`k` needs 4000 bytes"),
        (header(0, 1, text("k"), struct.pack("<IIQ", 9, 8, 1000)), "says to have 1000 strings"),
        (header(0, 1, text("k"), struct.pack("<IIQQ", 9, 8, 1, 1 << 60)), "string 0 of `k`"),
        (header(0, 1, text("k"), struct.pack("<IIQQ", 9, 8, 1, 100), b"short"), "string 0 of `k` says to be 100"),
        (header(0, 1, text("k"), struct.pack("<IIQQ", 9, 8, 1, 1), b"\xff"), "string 0 of `k` is not UTF-8"),
        (header(0, 1, text("k"), struct.pack("<IIQQ", 9, 8, 2, 8), bytes(12)), "cut short at string 1 of 2"),
        (header(0, 1, text("k"), struct.pack("<IIQ", 9, 9, 1), bytes(12)), "elements of type 9"),
        (header(0, 2, text("k"), struct.pack("<II", 4, 1), text("k"), struct.pack("<II", 4, 1)), "`k` is there twice"),
        (header(0, 1, text("general.alignment"), struct.pack("<II", 4, 3)), "power of two"),
        (header(0, 1, text("general.alignment"), struct.pack("<II", 4, 0)), "power of two"),
        (header(1, 0, tensor("t", [1] * 5)), "5 dimensions"),
        (header(1, 0, tensor("t", [])), "0 dimensions"),
        (header(1, 0, tensor("t", [4], kind=4), bytes(99)), "type 4"),
        (header(1, 0, tensor("t", [0, 4]), bytes(99)), "shape [0, 4]"),
        (header(1, 0, tensor("t", [33, 4], kind=8), bytes(999)), "whole blocks of 32"),
        (header(1, 0, tensor("t", [4], offset=1), bytes(99)), "not a multiple of 32"),
        (header(1, 0, tensor("t", [1 << 62, 1 << 62]), bytes(99)), "cut short or damaged"),
        (header(1, 0, tensor("t", [4], offset=1 << 40), bytes(99)), "cut short or damaged"),
        (header(2, 0, tensor("t", [4]), tensor("t", [4], offset=32), bytes(99)), "`t` is there twice"),
        (header(2, 0, tensor("t", [9]), tensor("u", [4], offset=32), bytes(199)), "shares bytes"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, data: bytes, says: str) -> None:
    with pytest.raises(ModelError) as refused:
        read(tmp_path, data)
    assert says in str(refused.value)
    assert "file.gguf" in str(refused.value)


def test_many_arrays_together_have_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_metadata, "MAX_ELEMENTS", 10)
    arrays = [text(f"k{i}") + struct.pack("<IIQ", 9, 0, 6) + bytes(6) for i in range(2)]
    assert read(tmp_path, header(0, 1, *arrays)).metadata == {"k0": [0] * 6}
    with pytest.raises(ModelError, match="the most in all arrays together is 10"):
        read(tmp_path, header(0, 2, *arrays))


def test_a_missing_file_or_a_folder_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.gguf", tmp_path):
        with pytest.raises(ModelError, match="no such file"):
            read_metadata(path)


def test_a_file_cut_anywhere_is_refused(tmp_path: Path, small: bytes) -> None:
    end = max(tensor.offset + tensor.n_bytes for tensor in read(tmp_path, small).tensors.values())
    for n_bytes in range(end):
        with pytest.raises(ModelError):
            read(tmp_path, small[:n_bytes])


def test_random_damage_is_a_model_error_or_harmless(tmp_path: Path, small: bytes) -> None:
    """Whatever the bytes say, nothing else than ModelError comes out; lengths are the bytes that hurt most, so some get extreme values."""
    rng = random.Random(20)
    refused = 0
    for _ in range(1000):
        damaged = bytearray(small)
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(damaged) - 8)
            if rng.random() < 0.5:
                damaged[at] = rng.randrange(256)
            else:
                damaged[at : at + 8] = rng.choice([b"\xff" * 8, b"\x00" * 8, struct.pack("<Q", 1 << 31), struct.pack("<Q", len(small))])
        try:
            found = read(tmp_path, bytes(damaged))
        except ModelError:
            refused += 1
        else:
            assert all(tensor.offset + tensor.n_bytes <= len(small) for tensor in found.tensors.values())
    assert 100 < refused < 1000


def test_damage_to_the_real_header_is_a_model_error_or_harmless(tmp_path: Path, smollm2_path: Path) -> None:
    """The file is cut behind its header (its tensors then lie outside), so a read that gets that far is refused at the end."""
    with smollm2_path.open("rb") as file:
        real = file.read(1785664)
    rng = random.Random(7)
    for _ in range(12):
        damaged = bytearray(real)
        for _ in range(20):
            damaged[rng.randrange(2000)] = rng.randrange(256)
        with pytest.raises(ModelError):
            read(tmp_path, bytes(damaged))
