"""The header of a GGUF file: everything before the weights, read in a fraction of a second and believed in nothing.

In: the path of a GGUF file, version 2 or 3, little-endian. Out: a `GGUFHeader` with the metadata as plain Python values and, for each
tensor, where its bytes are. Every length is checked against what is left of the file before anything is allocated, so a truncated or
hostile file is a ModelError that names the place. No numpy and no torch: the gateway reads its tokenizer and chat template through this.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import mmap
import struct
from pathlib import Path
from typing import Any, Final

import msgspec

from relay.errors import ModelError

MAGIC: Final = b"GGUF"
DEFAULT_ALIGNMENT: Final = 32
MAX_DIMENSIONS: Final = 4
MAX_KEY_BYTES: Final = 65535
MAX_STRING_BYTES: Final = 16 << 20
MAX_ELEMENTS: Final = 8 << 20  # of all arrays together; the largest vocabularies with merges and scores have 1.5 million

_NUMBERS: Final = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<B"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_BOOL: Final = 7
_STRING: Final = 8
_ARRAY: Final = 9
_U32: Final = _NUMBERS[4]
_U64: Final = _NUMBERS[10]

TENSOR_TYPES: Final[dict[int, tuple[str, int, int]]] = {  # type id: (name, elements in a block, bytes in a block)
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}


class TensorInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Where one tensor lies.

    shape: outermost dimension first, as torch has it (a linear layer is [out, in]; the file stores it the other way round).
    type: ggml's name, such as "Q4_1". offset: of its first byte, from the start of the FILE. n_bytes: of the packed data.
    """

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int
    n_bytes: int


class GGUFHeader(msgspec.Struct, frozen=True, kw_only=True):
    """What a GGUF file says before its weights. `metadata` holds bool, int, float, str and lists of one of them."""

    version: int
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    alignment: int
    data_offset: int


def read_metadata(path: Path) -> GGUFHeader:
    """Read and check the header. Raises ModelError with what is wrong and where."""
    if not path.is_file():
        raise ModelError(f"{path}: no such file; expected a .gguf file")
    try:
        if path.stat().st_size == 0:
            raise ModelError(f"{path}: the file is empty; fetch it again")
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Cursor(data, str(path)).header()
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error


class _Cursor:
    """A position in the file that only moves forward, and never past its end."""

    def __init__(self, data: mmap.mmap, where: str) -> None:
        self.data = data
        self.where = where
        self.at = 0
        self.end = len(data)
        self.elements_left = MAX_ELEMENTS

    def wrong(self, what: str) -> ModelError:
        return ModelError(f"{self.where}: not a sound GGUF file: {what} (near byte {self.at} of {self.end})")

    def take(self, n_bytes: int, what: str) -> int:
        """Move over `n_bytes`; returns where they begin."""
        if n_bytes > self.end - self.at:
            raise self.wrong(f"{what} needs {n_bytes} bytes and {self.end - self.at} are left: the file is cut short or damaged")
        begin = self.at
        self.at += n_bytes
        return begin

    def number(self, kind: struct.Struct, what: str) -> Any:
        return kind.unpack_from(self.data, self.take(kind.size, what))[0]

    def string(self, what: str, limit: int = MAX_STRING_BYTES) -> str:
        n_bytes = self.number(_U64, f"the length of {what}")
        if n_bytes > limit:
            raise self.wrong(f"{what} says to be {n_bytes} bytes long; the most is {limit}")
        begin = self.take(n_bytes, what)
        try:
            return self.data[begin : self.at].decode()
        except UnicodeDecodeError as error:
            raise self.wrong(f"{what} is not UTF-8") from error

    def header(self) -> GGUFHeader:
        magic = self.data[: len(MAGIC)]
        if magic != MAGIC:
            raise self.wrong(f"it begins with {magic!r} where a GGUF file begins with {MAGIC!r}")
        self.at = len(MAGIC)
        version = self.number(_U32, "the version")
        if version not in (2, 3):
            hint = "it seems to be big-endian; convert it" if version in (2 << 24, 3 << 24) else "convert it with a current llama.cpp"
            raise self.wrong(f"its version is {version}; 2 and 3 are read: {hint}")
        n_tensors = self.number(_U64, "the number of tensors")
        n_keys = self.number(_U64, "the number of metadata keys")
        metadata: dict[str, Any] = {}
        for i in range(n_keys):
            key = self.string(f"metadata key {i} of {n_keys}", MAX_KEY_BYTES)
            if key in metadata:
                raise self.wrong(f"the metadata key `{key}` is there twice")
            metadata[key] = self.value(self.number(_U32, f"the type of `{key}`"), f"`{key}`")
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            raise self.wrong(f"`general.alignment` is {alignment!r}; expected a power of two up to 1048576")
        tensors: dict[str, TensorInfo] = {}
        for i in range(n_tensors):
            tensor = self.tensor(f"tensor {i} of {n_tensors}", alignment)
            if tensor.name in tensors:
                raise self.wrong(f"the tensor `{tensor.name}` is there twice")
            tensors[tensor.name] = tensor
        data_offset = self.at + -self.at % alignment
        placed = {name: msgspec.structs.replace(tensor, offset=data_offset + tensor.offset) for name, tensor in tensors.items()}
        self.check_places(placed)
        return GGUFHeader(version=version, metadata=metadata, tensors=placed, alignment=alignment, data_offset=data_offset)

    def value(self, kind: int, what: str) -> Any:
        if kind == _STRING:
            return self.string(what)
        if kind == _ARRAY:
            return self.array(what)
        if kind not in _NUMBERS:
            raise self.wrong(f"{what} has the value type {kind}, which does not exist")
        number = self.number(_NUMBERS[kind], what)
        return bool(number) if kind == _BOOL else number

    def array(self, what: str) -> list[Any]:
        kind = self.number(_U32, f"the element type of {what}")
        count = self.number(_U64, f"the length of {what}")
        if count > self.elements_left:
            raise self.wrong(f"{what} says to have {count} elements; the most in all arrays together is {MAX_ELEMENTS}")
        self.elements_left -= count
        if kind == _STRING:
            return self.strings(count, what)
        if kind not in _NUMBERS:
            raise self.wrong(f"{what} has elements of type {kind}; expected numbers or strings")
        code = _NUMBERS[kind].format[1:]
        begin = self.take(count * _NUMBERS[kind].size, what)
        numbers = struct.unpack_from(f"<{count}{code}", self.data, begin)
        return [bool(number) for number in numbers] if kind == _BOOL else list(numbers)

    def strings(self, count: int, what: str) -> list[str]:
        """The hot loop: a vocabulary and its merges are 100,000 strings."""
        if count * _U64.size > self.end - self.at:
            raise self.wrong(f"{what} says to have {count} strings and {self.end - self.at} bytes are left")
        found: list[str] = []
        data, at, end, length_at = self.data, self.at, self.end, _U64.unpack_from
        try:
            for _ in range(count):
                (n_bytes,) = length_at(data, at)
                at += 8
                if n_bytes > end - at or n_bytes > MAX_STRING_BYTES:
                    raise self.wrong(f"string {len(found)} of {what} says to be {n_bytes} bytes long")
                found.append(data[at : at + n_bytes].decode())
                at += n_bytes
        except UnicodeDecodeError as error:
            raise self.wrong(f"string {len(found)} of {what} is not UTF-8") from error
        except struct.error as error:
            raise self.wrong(f"{what} is cut short at string {len(found)} of {count}") from error
        self.at = at
        return found

    def tensor(self, what: str, alignment: int) -> TensorInfo:
        """One tensor's record; its offset is still from the start of the data."""
        name = self.string(f"the name of {what}", MAX_KEY_BYTES)
        n_dimensions = self.number(_U32, f"the dimensions of `{name}`")
        if not 1 <= n_dimensions <= MAX_DIMENSIONS:
            raise self.wrong(f"the tensor `{name}` has {n_dimensions} dimensions; expected 1 to {MAX_DIMENSIONS}")
        stored = [self.number(_U64, f"the shape of `{name}`") for _ in range(n_dimensions)]
        kind = self.number(_U32, f"the type of `{name}`")
        offset = self.number(_U64, f"the offset of `{name}`")
        if kind not in TENSOR_TYPES:
            raise self.wrong(f"the tensor `{name}` has type {kind}, which is not known here")
        type_name, block_elements, block_bytes = TENSOR_TYPES[kind]
        n_elements = 1
        for dimension in stored:
            n_elements *= dimension
        if n_elements == 0 or stored[0] % block_elements:
            raise self.wrong(f"the tensor `{name}` has shape {stored}; {type_name} takes rows of whole blocks of {block_elements}")
        if offset % alignment:
            raise self.wrong(f"the tensor `{name}` begins at {offset}, which is not a multiple of {alignment}")
        n_bytes = n_elements // block_elements * block_bytes
        return TensorInfo(name=name, shape=tuple(reversed(stored)), type=type_name, offset=offset, n_bytes=n_bytes)

    def check_places(self, tensors: dict[str, TensorInfo]) -> None:
        """Each tensor lies within the file, and no two share a byte."""
        free_from = 0
        for tensor in sorted(tensors.values(), key=lambda tensor: tensor.offset):
            if tensor.offset + tensor.n_bytes > self.end:
                raise self.wrong(
                    f"the tensor `{tensor.name}` ends at byte {tensor.offset + tensor.n_bytes}: the file is cut short or damaged"
                )
            if tensor.offset < free_from:
                raise self.wrong(f"the tensor `{tensor.name}` shares bytes with another")
            free_from = tensor.offset + tensor.n_bytes
