"""Tensors as a file holds them: named, typed, shaped, and not unpacked.

Numbers of a quantized type come in blocks along the rows: a row of n_in numbers is n_in / (elements of a block) blocks, and rows follow
each other without a gap. So rows can be cut out and put in another order as plain bytes. Kernels that read packed weights start here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from relay.model.gguf_metadata import TENSOR_TYPES

BLOCKS: Final = {name: (elements, n_bytes) for name, elements, n_bytes in TENSOR_TYPES.values()}  # type: (elements, bytes) of a block


class TensorInfo(msgspec.Struct, frozen=True):
    """type: ggml's name, such as "Q4_1"; F32, F16 and BF16 are what safetensors call so too. shape: outermost dimension first."""

    type: str
    shape: tuple[int, ...]


class TensorSource(Protocol):
    """Tensors of one model, wherever they come from. `where` is the file or folder, for errors."""

    where: str

    def infos(self) -> Mapping[str, TensorInfo]:
        """All that there are, by name."""
        ...

    def data(self, name: str) -> NDArray[np.uint8]:
        """The bytes of one, [n_bytes]. Of a file they are mapped, not read, and stay while the array is referenced."""
        ...


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """rows: uint8 [n_out, bytes of a row]; n_in numbers of `type` in each. Not to be written to."""

    type: str
    n_in: int
    rows: NDArray[np.uint8]

    @property
    def n_out(self) -> int:
        return len(self.rows)


def row_bytes(kind: str, n_in: int) -> int:
    """Bytes of a row of `n_in` numbers, which must be whole blocks."""
    elements, n_bytes = BLOCKS[kind]
    assert n_in % elements == 0
    return n_in // elements * n_bytes
