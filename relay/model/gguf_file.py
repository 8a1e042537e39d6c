"""The tensors of a GGUF file as a `TensorSource`: mapped, never copied. The header has been checked by `relay.model.gguf_metadata`."""

import mmap
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from relay.errors import ModelError
from relay.model.gguf_metadata import GGUFHeader
from relay.model.packed import TensorInfo


class GGUFFile:
    """A `TensorSource`."""

    def __init__(self, path: Path, header: GGUFHeader) -> None:
        """Raises ModelError if the file can no longer be read."""
        self.where = str(path)
        self._places = {name: (info.offset, info.n_bytes) for name, info in header.tensors.items()}
        self._infos = {name: TensorInfo(info.type, info.shape) for name, info in header.tensors.items()}
        self._bytes = map_file(path)

    def infos(self) -> Mapping[str, TensorInfo]:
        return self._infos

    def data(self, name: str) -> NDArray[np.uint8]:
        offset, n_bytes = self._places[name]
        return self._bytes[offset : offset + n_bytes]


def map_file(path: Path) -> NDArray[np.uint8]:
    """A whole file as bytes. Copy-on-write, since torch wants memory that could be written to. Raises ModelError."""
    try:
        with path.open("rb") as file:
            return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), dtype=np.uint8)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error
