"""Weights out of a GGUF file, as float32 torch tensors.

In: the path. Out: `Weights`. Refused by name: a tensor that is missing, has another shape or a type that is not dequantized here, and one
that nothing reads (a bias that is left out makes another model). Block formats: https://github.com/ggml-org/ggml (ggml-common.h).
"""

import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from relay.errors import ModelError
from relay.model.gguf_metadata import GGUFHeader, TensorInfo, read_metadata
from relay.model.spec import ModelSpec, spec_from_gguf
from relay.model.weights import LayerWeights, Weights


def _f32(raw: Tensor) -> Tensor:
    return raw.view(torch.float32).clone()


def _q8_0(raw: Tensor) -> Tensor:
    """Blocks of 32: float16 d, int8 q[32]; d q."""
    blocks = raw.view(-1, 34)
    return blocks[:, 2:].view(torch.int8).float().mul_(_halves(blocks, 0))


def _q4_1(raw: Tensor) -> Tensor:
    """Blocks of 32: float16 d, m, then 16 bytes: elements 0-15 in the low nibbles, 16-31 in the high ones; d q + m."""
    blocks = raw.view(-1, 20)
    nibbles = blocks[:, 4:]
    out = torch.empty(len(blocks), 2, 16)
    out[:, 0] = nibbles & 15
    out[:, 1] = nibbles >> 4
    return out.mul_(_halves(blocks, 0)[:, :, None]).add_(_halves(blocks, 2)[:, :, None])


def _halves(blocks: Tensor, at: int) -> Tensor:
    """The float16 that begins at byte `at` of each block: float32 [n_blocks, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


_DEQUANTIZE: Final[dict[str, Callable[[Tensor], Tensor]]] = {"F32": _f32, "Q8_0": _q8_0, "Q4_1": _q4_1}


class GGUFTensors:
    """Tensors of one file by name; remembers which were read."""

    def __init__(self, path: Path, header: GGUFHeader) -> None:
        self._path = path
        self._left: dict[str, TensorInfo] = dict(header.tensors)
        with path.open("rb") as file:
            self._data = torch.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor in float32, once. Raises ModelError if it is not there, not of this shape, or of a type that is not read."""
        info = self._left.pop(name, None)
        if info is None:
            raise ModelError(f"{self._path}: the tensor `{name}` is missing; fetch the file again or use another model")
        if info.shape != shape:
            raise ModelError(f"{self._path}: the tensor `{name}` has shape {list(info.shape)}; expected {list(shape)}")
        if info.type not in _DEQUANTIZE:
            raise ModelError(f"{self._path}: the tensor `{name}` is {info.type}; expected one of: {', '.join(_DEQUANTIZE)}")
        return _DEQUANTIZE[info.type](self._data[info.offset : info.offset + info.n_bytes]).view(shape)

    def refuse_rest(self) -> None:
        """Raise ModelError if there are tensors that nothing has read."""
        if self._left:
            raise ModelError(f"{self._path}: nothing here reads {len(self._left)} of its tensors, such as `{next(iter(self._left))}`")


def load_gguf(path: Path) -> Weights:
    """Read a whole model. Raises ModelError with the file and the tensor."""
    header = read_metadata(path)
    spec = spec_from_gguf(header)
    tensors = GGUFTensors(path, header)
    embedding = tensors.take("token_embd.weight", spec.vocab_size, spec.hidden)
    weights = Weights(
        spec=spec,
        embedding=embedding,
        layers=tuple(_layer(tensors, spec, f"blk.{i}") for i in range(spec.n_layers)),
        final_norm=tensors.take("output_norm.weight", spec.hidden),
        head=embedding if spec.tied_embeddings else tensors.take("output.weight", spec.vocab_size, spec.hidden),
    )
    tensors.refuse_rest()
    return weights


def _layer(tensors: GGUFTensors, spec: ModelSpec, prefix: str) -> LayerWeights:
    hidden, ffn = spec.hidden, spec.ffn
    q_rows, kv_rows = spec.n_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim
    q = tensors.take(f"{prefix}.attn_q.weight", q_rows, hidden)
    k = tensors.take(f"{prefix}.attn_k.weight", kv_rows, hidden)
    if spec.traits.interleaved_qk:
        q, k = half_split(q, spec.head_dim), half_split(k, spec.head_dim)
    gate, up = (tensors.take(f"{prefix}.ffn_{name}.weight", ffn, hidden) for name in ("gate", "up"))
    return LayerWeights(
        attn_norm=tensors.take(f"{prefix}.attn_norm.weight", hidden),
        qkv=torch.cat((q, k, tensors.take(f"{prefix}.attn_v.weight", kv_rows, hidden))),
        attn_out=tensors.take(f"{prefix}.attn_output.weight", hidden, q_rows),
        ffn_norm=tensors.take(f"{prefix}.ffn_norm.weight", hidden),
        gate_up=torch.cat((gate, up)),
        down=tensors.take(f"{prefix}.ffn_down.weight", hidden, ffn),
    )


def half_split(rows: Tensor, head_dim: int) -> Tensor:
    """Rows [n_heads * head_dim, n] whose rope pairs are (2i, 2i+1) in each head, in the order (i, i + head_dim/2)."""
    return rows.view(-1, head_dim // 2, 2, rows.shape[-1]).transpose(1, 2).reshape(rows.shape)
