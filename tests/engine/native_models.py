"""Small models in memory, in any mix of packed types, and native runners on them."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import gguf
import msgspec
import numpy as np
from gguf.quants import quantize
from numpy.random import Generator
from numpy.typing import NDArray

from relay.engine.native.pack import pack_into, packed_size
from relay.engine.native.runner import NativeRunner, native_layout
from relay.kv.memory import KVMemory
from relay.model.checkpoint import Checkpoint
from relay.model.packed import BLOCKS, TensorInfo
from relay.model.placing import Place
from relay.model.rope_spec import RopeSpec
from relay.model.slots import Slot, slots
from relay.model.spec import ModelSpec
from tests.engine.schedules import Pool

SMALL = ModelSpec(
    architecture="llama",
    n_layers=2,
    hidden=256,
    n_heads=6,
    n_kv_heads=2,
    head_dim=32,
    ffn=512,
    vocab_size=333,
    rope=RopeSpec(theta=10000.0),
    rms_eps=1e-5,
    max_context=1024,
    tied_embeddings=False,
    attn_scale=32**-0.5,
    windows=(0, 0),
)


_K_TYPES = ("Q4_K", "Q5_K", "Q6_K")


def variant(**changes: Any) -> ModelSpec:
    spec = msgspec.structs.replace(SMALL, **changes)
    return msgspec.structs.replace(spec, windows=changes.get("windows", (0,) * spec.n_layers), attn_scale=spec.head_dim**-0.5)


def packed_rows(kind: str, values: NDArray[np.float32], rng: Generator) -> NDArray[np.uint8]:
    """values: [n_out, n_in] -> uint8 [n_out, bytes of a row]. K types, which nothing here quantizes to, get random blocks of its spread."""
    n_out, n_in = values.shape
    if kind not in _K_TYPES:
        packed = quantize(values, gguf.GGMLQuantizationType[kind])
        return np.ascontiguousarray(packed).reshape(n_out, -1).view(np.uint8)
    elements, n_bytes = BLOCKS[kind]
    blocks = rng.integers(0, 256, (n_out * n_in // elements, n_bytes), dtype=np.uint8)
    spread = np.float16(values.std())
    halves = {
        "Q4_K": ((0, spread / 200), (2, spread / 30)),
        "Q5_K": ((0, spread / 400), (2, spread / 30)),
        "Q6_K": ((208, spread / 1500),),
    }[kind]
    for at, scale in halves:
        blocks[:, at : at + 2] = np.array([scale], np.float16).view(np.uint8)
    return blocks.reshape(n_out, -1)


@dataclass
class MemoryTensors:
    """A `TensorSource` of arrays."""

    arrays: dict[str, NDArray[np.uint8]]
    types: dict[str, TensorInfo]
    where: str = field(default="memory")

    def infos(self) -> Mapping[str, TensorInfo]:
        return self.types

    def data(self, name: str) -> NDArray[np.uint8]:
        return self.arrays[name].reshape(-1)


def checkpoint_of(spec: ModelSpec, kinds: str | tuple[str, ...], seed: int = 0) -> Checkpoint:
    """Random weights; matrices take the types in turn. Large enough that attention is far from uniform."""
    rng, kinds = np.random.default_rng(seed), (kinds,) if isinstance(kinds, str) else kinds
    tensors = MemoryTensors({}, {})
    for i, slot in enumerate(slots(spec)):
        if len(slot.shape) == 1:
            values = (rng.standard_normal(slot.shape) * 0.1 + (0.0 if slot.name.endswith("bias") else 1.0)).astype(np.float32)
            tensors.arrays[slot.name], tensors.types[slot.name] = values.view(np.uint8), TensorInfo("F32", slot.shape)
            continue
        gain = 2.0 if slot.part in ("q", "k") else 1.0
        values = (rng.standard_normal(slot.shape) * (gain / np.sqrt(slot.shape[1]))).astype(np.float32)
        kind = kinds[i % len(kinds)]
        tensors.arrays[slot.name], tensors.types[slot.name] = packed_rows(kind, values, rng), TensorInfo(kind, slot.shape)
    return Checkpoint(spec, tensors, _own_place)


def _own_place(spec: ModelSpec, slot: Slot) -> Place:
    return Place(slot.name, slot.shape)


def packed_fd(checkpoint: Checkpoint) -> int:
    """A memfd of the packed model, the caller's to close."""
    size = packed_size(checkpoint)
    data = np.zeros(size, np.uint8)
    pack_into(checkpoint, data, threads=2)
    fd = os.memfd_create("weights")
    os.write(fd, data.tobytes())
    return fd


class NativePool(Pool):
    """The same as `Pool` on a native runner."""

    def __init__(
        self,
        weights_fd: int,
        spec: ModelSpec,
        n_blocks: int,
        rng: Generator,
        dtype: str = "bfloat16",
        *,
        threads: int = 1,
        activations: Any = "a16",
    ) -> None:
        self.memory = KVMemory(native_layout(spec, dtype, n_blocks))
        self.memory.pages[:] = 2**64 - 1
        self.runner: Any = NativeRunner(self.memory, weights_fd, threads=threads, activations=activations, keep_logits=True)
        self.rng = rng
        self._free = [int(block) for block in rng.permutation(n_blocks)]
