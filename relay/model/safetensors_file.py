"""One safetensors file: its header read and believed in nothing, its tensors mapped and never copied.

Our own reader rather than the package's, for three reasons: kernels want the bytes of a tensor as they lie in the file, which the package
does not hand out; numpy has no bfloat16, so the package needs torch for it, which a gateway must not load; and what is wrong with a file
should be a ModelError that names the tensor. Format: 8 bytes length, little-endian; so many bytes of JSON; the data, without gaps.
Source: https://github.com/huggingface/safetensors
"""

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from relay.errors import ModelError
from relay.model.gguf_file import map_file
from relay.model.packed import TensorInfo

MAX_HEADER_BYTES: Final = 100_000_000  # the format's own limit
_BITS: Final = {
    name: bits
    for bits, names in {
        4: "F4",
        6: "F6_E2M3 F6_E3M2",
        8: "BOOL I8 U8 F8_E4M3 F8_E5M2 F8_E8M0",
        16: "I16 U16 F16 BF16",
        32: "I32 U32 F32",
        64: "I64 U64 F64 C64",
    }.items()
    for name in names.split()
}
_Size = Annotated[int, Meta(ge=0, le=1 << 62)]


class _Entry(msgspec.Struct, frozen=True):
    """What the header says of one tensor. data_offsets: first byte and the one after the last, from the start of the data."""

    dtype: str
    shape: Annotated[list[_Size], Meta(max_length=16)]
    data_offsets: tuple[_Size, _Size]


class SafetensorsFile:
    """A `TensorSource`. Raises ModelError for a file that is not sound."""

    def __init__(self, path: Path) -> None:
        self.where = str(path)
        self._bytes = map_file(path)
        self._entries, self._data_at = self._header()
        self._infos = {name: TensorInfo(entry.dtype, tuple(entry.shape)) for name, entry in self._entries.items()}

    def infos(self) -> Mapping[str, TensorInfo]:
        return self._infos

    def data(self, name: str) -> NDArray[np.uint8]:
        begin, end = self._entries[name].data_offsets
        return self._bytes[self._data_at + begin : self._data_at + end]

    def _header(self) -> tuple[dict[str, _Entry], int]:
        size = len(self._bytes)
        if size < 8:
            raise self._wrong(f"it has {size} bytes, and 8 give the length of its header")
        n_bytes = int.from_bytes(self._bytes[:8].tobytes(), "little")
        if n_bytes > min(size - 8, MAX_HEADER_BYTES):
            raise self._wrong(f"its header says to be {n_bytes} bytes long, and {size - 8} follow; the most is {MAX_HEADER_BYTES}")
        try:
            raw = msgspec.json.decode(self._bytes[8 : 8 + n_bytes].tobytes(), type=dict[str, msgspec.Raw])
            raw.pop("__metadata__", None)
            entries = {name: self._entry(name, value) for name, value in raw.items()}
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise self._wrong(f"its header cannot be read: {error}") from error
        self._check_places(entries, size - 8 - n_bytes)
        return entries, 8 + n_bytes

    def _entry(self, name: str, value: Any) -> _Entry:
        try:
            entry = msgspec.json.decode(value, type=_Entry)
        except (msgspec.DecodeError, RecursionError) as error:
            raise self._wrong(f"what its header says of the tensor {_shown(name)} cannot be read: {error}") from error
        if entry.dtype not in _BITS:
            raise self._wrong(f"the tensor {_shown(name)} has the type {_shown(entry.dtype)}, which is not known here")
        begin, end = entry.data_offsets
        n_bits = prod(entry.shape) * _BITS[entry.dtype]
        if 8 * (end - begin) != n_bits:
            raise self._wrong(
                f"the tensor {_shown(name)} of shape {entry.shape} and type {entry.dtype} has {end - begin} bytes, not {n_bits / 8:.0f}"
            )
        return entry

    def _check_places(self, entries: dict[str, _Entry], n_bytes: int) -> None:
        """The tensors fill the data from its first byte to its last, and share none."""
        at = 0
        for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
            begin, end = entry.data_offsets
            if begin != at:
                raise self._wrong(f"the tensor {_shown(name)} begins at byte {begin} of the data, and the one before it ends at {at}")
            at = end
        if at != n_bytes:
            raise self._wrong(f"its tensors have {at} bytes and {n_bytes} follow the header: the file is cut short or damaged")

    def _wrong(self, what: str) -> ModelError:
        return ModelError(f"{self.where}: not a sound safetensors file: {what}; fetch it again")


def _shown(name: str) -> str:
    """A name out of a file, of bearable length and without anything that a terminal would act on."""
    return ascii(name if len(name) < 200 else name[:200] + "...")
