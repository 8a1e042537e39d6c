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
_CHUNK: Final = 1 << 15  # numbers at a time, so that they stay in cache, and in memory that the allocator has at hand


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
            middle = np.float32(0.0 if name.endswith("_bias") else 1.0)
            return (_numbers(stream, shape[0], 0.1) + middle).view(np.uint8)
        out = np.empty(prod(shape), np.uint16)
        for begin in range(0, len(out), _CHUNK):
            part = out[begin : begin + _CHUNK]
            part[:] = _numbers(stream, len(part), 1 / sqrt(shape[-1])).view(np.uint16)[1::2]  # the upper half of a float32 is a bfloat16
        return out.view(np.uint8)

    def _stream(self, name: str) -> SFC64:
        digest = hashlib.blake2b(f"{self._key}/{name}".encode(), digest_size=16).digest()
        return SFC64(SeedSequence(int.from_bytes(digest, "little")))


def _numbers(stream: SFC64, n: int, deviation: float) -> NDArray[np.float32]:
    """Each one of 256 evenly spaced values around 0 with this standard deviation."""
    step = np.float32(deviation * sqrt(12 / (256**2 - 1)))
    places = np.asarray(stream.random_raw(-(-n // 8))).view(np.int8)[:n]
    numbers = np.multiply(places, step, dtype=np.float32)
    numbers += step / 2
    return numbers
