"""A model as the native kernels read it: one file, usually a memfd, with a header that says where everything lies.

    8 bytes magic | 8 bytes length of the header | header: msgpack of `Contents` | data, from a multiple of 4096 on

Matrices are packed (`relay.kernels.packed_matmul`), in the order of a forward pass; vectors are float32, padded to a multiple of 32 with
zeros. Offsets are from the start of the file. The root plans and packs, workers map; a tied head is there once.
"""

import struct
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from relay.errors import KernelsUnavailable, ModelError
from relay.kernels.packed_matmul import BLOCK, Format, matrix_bytes, padded
from relay.kernels.paged_attention import PAGE_TOKENS, TILE_QUERIES
from relay.model.checkpoint import Checkpoint
from relay.model.spec import ModelSpec

MAGIC: Final = b"RELAYPK1"
_PREFIX: Final = struct.Struct("<8sQ")
_ALIGNMENT: Final = 4096


class PackedTensor(msgspec.Struct, frozen=True, array_like=True):
    """A matrix [n_out, n_in] of `format`, or (format -1) a vector of n_out floats."""

    offset: int
    format: int
    n_out: int
    n_in: int = 1

    @property
    def n_bytes(self) -> int:
        return 4 * padded(self.n_out, BLOCK) if self.format < 0 else matrix_bytes(Format(self.format), self.n_out, self.n_in)


class Contents(msgspec.Struct, frozen=True):
    """tensors: by slot (`relay.model.slots`). n_bytes: of the whole file."""

    spec: ModelSpec
    tensors: dict[str, PackedTensor]
    n_bytes: int


def plan_contents(checkpoint: Checkpoint) -> Contents:
    """Where everything will lie. Raises KernelsUnavailable with what the kernels do not cover."""
    reason = _why_not(checkpoint)
    if reason:
        raise KernelsUnavailable(f"the native kernels do not cover this model: {reason}")
    tensors: dict[str, PackedTensor] = {}
    at = 0
    for name in checkpoint.names:
        shape = checkpoint.shape(name)
        kind = int(Format[checkpoint.matrix(name).type]) if len(shape) == 2 else -1
        tensors[name] = PackedTensor(at, kind, *shape)
        at += padded(tensors[name].n_bytes, 64)
    # offsets take more bytes once the header's own length is added to them: leave room for that
    room = len(msgspec.msgpack.encode(Contents(checkpoint.spec, tensors, at))) + 16 * len(tensors) + _PREFIX.size
    begin = padded(room, _ALIGNMENT)
    placed = {name: msgspec.structs.replace(tensor, offset=begin + tensor.offset) for name, tensor in tensors.items()}
    return Contents(checkpoint.spec, placed, begin + at)


def write_header(contents: Contents, to: NDArray[np.uint8]) -> None:
    """to: the file's bytes."""
    header = msgspec.msgpack.encode(contents)
    prefix = _PREFIX.pack(MAGIC, len(header))
    to[: len(prefix)] = np.frombuffer(prefix, np.uint8)
    to[len(prefix) : len(prefix) + len(header)] = np.frombuffer(header, np.uint8)


def read_header(data: NDArray[np.uint8]) -> Contents:
    """Raises ModelError if these are not a packed model's bytes."""
    if len(data) < _PREFIX.size:
        raise ModelError(f"packed weights of {len(data)} bytes are none; pack the model again")
    magic, n_bytes = _PREFIX.unpack(data[: _PREFIX.size].tobytes())
    if magic != MAGIC or n_bytes > len(data) - _PREFIX.size:
        raise ModelError("these are not packed weights, or not of this version; pack the model again")
    contents = msgspec.msgpack.decode(data[_PREFIX.size : _PREFIX.size + n_bytes].tobytes(), type=Contents)
    if contents.n_bytes > len(data) or any(t.offset + t.n_bytes > contents.n_bytes for t in contents.tensors.values()):
        raise ModelError("packed weights are cut short; pack the model again")
    return contents


def _why_not(checkpoint: Checkpoint) -> str:
    spec, traits = checkpoint.spec, checkpoint.spec.traits
    if traits.experts:
        return "experts"
    if traits.post_norms or not traits.pre_norms:
        return "norms at the outputs of attention and network"
    if traits.qk_norm == "width":
        return "norms of q and k over all heads"
    if traits.activation != "silu" or traits.scaled_embedding or spec.attn_softcap or spec.final_softcap or spec.local_rope:
        return "Gemma's activation, embedding scale, soft caps or second rope"
    if spec.head_dim % PAGE_TOKENS:
        return f"heads of width {spec.head_dim}"
    if spec.group > TILE_QUERIES:
        return f"{spec.group} query heads to a K/V head"
    for name in checkpoint.names:
        if len(checkpoint.shape(name)) == 2 and checkpoint.matrix(name).type not in Format.__members__:
            return f"`{name}` is {checkpoint.matrix(name).type}"
    return ""
