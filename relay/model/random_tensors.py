"""Random weights as a `TensorSource`: every number a function of the model's name, the seed and the tensor's own name.

No file holds them: each process makes the same ones when it asks. Matrices are BF16, one of 256 evenly spaced values each, with the spread
1 / sqrt(n_in) that keeps what passes through them at its size; norms are near 1, biases small; F32. numpy promises that the raw stream of
a bit generator stays what it is in all versions.
"""

import hashlib
from collections.abc import Mapping
from math import prod, sqrt
from pathlib import Path
from typing import Final

import numpy as np
from numpy.random import SFC64, SeedSequence
from numpy.typing import NDArray

from relay.errors import ModelError
from relay.model.hf_folder import read_json
from relay.model.packed import TensorInfo
from relay.model.placing import Place
from relay.model.slots import Slot, slots
from relay.model.spec import ModelSpec

SEED_FILE: Final = "random.json"  # in the model's folder: its name and seed
_CHUNK: Final = 32 << 20


def own_place(spec: ModelSpec, slot: Slot) -> Place:
    """Tensors are called what our slots are called."""
    return Place(slot.name, slot.shape)


class RandomTensors:
    """Of the folder that `relay.model.random_models` made. Raises ModelError for one that it did not."""

    def __init__(self, folder: Path, spec: ModelSpec) -> None:
        self.where = str(folder)
        found = read_json(folder / SEED_FILE)
        if not isinstance(found.get("model"), str) or type(found.get("seed")) is not int:
            raise ModelError(
                f"{folder / SEED_FILE}: expected `model`, a name, and `seed`, a number; delete the folder to have it made again"
            )
        self._key = f"{found['model']}/{found['seed']}"
        self._infos = {slot.name: TensorInfo("F32" if len(slot.shape) == 1 else "BF16", slot.shape) for slot in slots(spec)}

    def infos(self) -> Mapping[str, TensorInfo]:
        return self._infos

    def data(self, name: str) -> NDArray[np.uint8]:
        """Made anew each time."""
        shape, stream = self._infos[name].shape, self._stream(name)
        if len(shape) == 1:
            spread = _levels(0.1) + np.float32(0.0 if name.endswith("_bias") else 1.0)
            return spread[_bytes(stream, shape[0])].view(np.uint8)
        table = _bfloat16(_levels(1 / sqrt(shape[-1])))
        out = np.empty(prod(shape), np.uint16)
        for begin in range(0, len(out), _CHUNK):
            part = out[begin : begin + _CHUNK]
            np.take(table, _bytes(stream, len(part)), out=part)
        return out.view(np.uint8)

    def _stream(self, name: str) -> SFC64:
        digest = hashlib.blake2b(f"{self._key}/{name}".encode(), digest_size=16).digest()
        return SFC64(SeedSequence(int.from_bytes(digest, "little")))


def _bytes(stream: SFC64, n: int) -> NDArray[np.uint8]:
    return np.asarray(stream.random_raw(-(-n // 8))).view(np.uint8)[:n]


def _levels(deviation: float) -> NDArray[np.float32]:
    """256 evenly spaced values around 0 with this standard deviation."""
    return np.asarray((np.arange(256) - 127.5) * (deviation * sqrt(12 / (256**2 - 1))), np.float32)


def _bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Rounded to nearest, ties to even."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
