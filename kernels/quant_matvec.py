"""y = W x over weights that stay packed in 4 or 8 bits, for a few rows of x.

    w[o, k] = scale[o, k / group] q[o, k] + least[o, k / group]          y[r, o] = sum over k of w[o, k] x[r, k]

    x       [n_rows, n_in]              bf16 or fp16; n_in a multiple of 64
    out     [n_rows, n_out]             the same type, or float32

    Format  q                       scales                                              bits a weight
    Q4_0    0 to 15, less 8         fp16 of 32                                          4.5
    Q4_1    0 to 15                 fp16 scale and least of 32                          5
    Q4_K    0 to 15                 6 bits of 32 times fp16 of 256, both                4.625
    Q4_Z    0 to 15                 fp16 scale, whole zero point of `group`: AWQ, GPTQ  4 + 64 / group
    Q8_0    int8                    fp16 of 32                                          8.5
    Q8_G    int8                    float32 of `group`                                  8 + 64 / group
    F8_G    e4m3                    float32 of `group`                                  8 + 64 / group

Packed for the kernel by `quant_packing`, nothing rounded (o: 16 tile + g + 8 r, k: 64 chunk + 32 p + 8 t + 4 s + 2 h + e; lane 4 g + t):

    codes   4 bits: [tile, chunk, lane, p, s] words of nibbles [e, h, r]      8 bits: [tile, chunk, p, lane, s, h, r, e] bytes
    records [tile, chunk or group, g, ...] words: fp16 pairs (r = 0, 1) or floats, see `quant_packing`; supers: Q4_K's d and dmin

Each output is the sum of eight parts, in order, of a chain over chunks: a row's bits depend on that row and on n_in alone. Sums in float32.
Source of the idea to pack for mma: Marlin, arXiv 2408.11743.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from relay.kernels.cuda_compiler import Program
from relay.kernels.cuda_library import CUDA, Device, Launch
from relay.kernels.tensor_check import ELEMENTS, element, expect

CHUNK: Final = 64
TILE: Final = 16
_BLOCK_OUTPUTS: Final = 32
_THREADS: Final = 256


class Format(Enum):
    """As in quant_matvec.cu."""

    Q4_0 = "Q4_0"
    Q4_1 = "Q4_1"
    Q4_K = "Q4_K"
    Q4_Z = "Q4_Z"
    Q8_0 = "Q8_0"
    Q8_G = "Q8_G"
    F8_G = "F8_G"

    @property
    def has_four_bits(self) -> bool:
        return self in (Format.Q4_0, Format.Q4_1, Format.Q4_K, Format.Q4_Z)

    @property
    def has_groups(self) -> bool:
        """A record for each `group` inputs, not for each chunk."""
        return self in (Format.Q4_Z, Format.Q8_G, Format.F8_G)

    @property
    def record_words(self) -> int:
        return 4 if self is Format.Q4_1 else 2


@dataclass(frozen=True, slots=True)
class Packed:
    """A matrix for the kernel. group: inputs that a record is for. codes: uint8; records, supers: int32, flat."""

    format: Format
    n_out: int
    n_in: int
    group: int
    codes: Tensor
    records: Tensor
    supers: Tensor

    @property
    def n_tiles(self) -> int:
        return -(-self.n_out // _BLOCK_OUTPUTS) * (_BLOCK_OUTPUTS // TILE)

    @property
    def n_bytes(self) -> int:
        """What one product reads of it."""
        return sum(t.numel() * t.element_size() for t in (self.codes, self.records, self.supers))

    def to(self, device: torch.device) -> "Packed":
        moved = (tensor.to(device) for tensor in (self.codes, self.records, self.supers))
        return Packed(self.format, self.n_out, self.n_in, self.group, *moved)


_PROGRAMS: Final = {
    (kind, form): Program("quant_matvec", (("ELEMENT", kind), ("FORMAT", form.value))) for kind in ELEMENTS.values() for form in Format
}
PROGRAMS: Final = tuple(_PROGRAMS.values())
_LAUNCH: Final = {(*key, rows): Launch(program, f"quant_matvec_{rows}") for key, program in _PROGRAMS.items() for rows in (8, 32)}


def quant_matvec(packed: Packed, x: Tensor, out: Tensor, *, rows: int | None = None, on: Device = CUDA) -> None:
    """Writes `out`. rows: 8 or 32, of x in a block at once; bits don't depend on it. Raises ValueError for tensors that do not fit."""
    kind = element("x", x)
    expect("x", x, (None, packed.n_in), x.dtype, on)
    n_rows = len(x)
    as_float = out.dtype == torch.float32
    expect("out", out, (n_rows, packed.n_out), torch.float32 if as_float else x.dtype, on)
    form, n_chunks, n_tiles = packed.format, packed.n_in // CHUNK, packed.n_tiles
    if packed.n_in % CHUNK or packed.group % CHUNK:
        raise ValueError(f"{packed.n_in} inputs in groups of {packed.group}; expected multiples of {CHUNK}")
    chunks_per_record = packed.group // CHUNK
    n_records = -(-n_chunks // chunks_per_record)
    expect("codes", packed.codes, (n_tiles * TILE * packed.n_in // (2 if form.has_four_bits else 1),), torch.uint8, on)
    expect("records", packed.records, (n_tiles * n_records * 8 * form.record_words,), torch.int32, on)
    expect("supers", packed.supers, (n_tiles * -(-n_chunks // 4) * 16 if form is Format.Q4_K else 0,), torch.int32, on)
    if n_rows == 0 or packed.n_out == 0:
        return
    rows = rows or (8 if n_rows <= 8 else 32)
    i32 = np.int32
    shape = (i32(n_rows), i32(packed.n_out), i32(packed.n_in), i32(chunks_per_record), i32(as_float))
    grid = (n_tiles * TILE // _BLOCK_OUTPUTS, -(-n_rows // rows), 1)
    on.launch(_LAUNCH[kind, form, rows], grid, _THREADS, (packed.codes, packed.records, packed.supers, x, out, *shape))


def reference(packed: Packed, x: Tensor) -> Tensor:
    """The same in float64, from the packed bytes: [n_rows, n_out]."""
    return x.double() @ torch.from_numpy(unpacked(packed)).t()


def unpacked(packed: Packed) -> NDArray[np.float64]:
    """The weights: [n_out, n_in]."""
    form, n_tiles, n_chunks = packed.format, packed.n_tiles, packed.n_in // CHUNK
    codes = packed.codes.cpu().numpy()
    if form.has_four_bits:
        words = codes.view(np.uint32).reshape(n_tiles, n_chunks, 8, 4, 2, 2)  # tile, chunk, g, t, p, s
        nibbles = (words[..., None] >> np.arange(0, 32, 4, dtype=np.uint32) & 15).reshape(*words.shape, 2, 2, 2)  # e, h, r
        # -> tile, r, g, chunk, p, t, s, h, e
        q = nibbles.transpose(0, 8, 2, 1, 4, 3, 5, 7, 6).reshape(n_tiles * TILE, packed.n_in).astype(np.float64)
    else:
        parts = codes.reshape(n_tiles, n_chunks, 2, 8, 4, 2, 2, 2, 2)  # tile, chunk, p, g, t, s, h, r, e
        q8 = np.ascontiguousarray(parts.transpose(0, 7, 3, 1, 2, 4, 5, 6, 8)).reshape(n_tiles * TILE, packed.n_in)
        q = torch.from_numpy(q8).view(torch.float8_e4m3fn).double().numpy() if form is Format.F8_G else q8.view(np.int8).astype(np.float64)
    scale, least = _scales(packed)
    unit = packed.n_in // scale.shape[1] if not form.has_groups else packed.group
    columns = np.arange(packed.n_in) // unit
    return np.asarray(scale[:, columns] * (q - 8 if form is Format.Q4_0 else q) + least[:, columns])[: packed.n_out]


def _scales(packed: Packed) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """[n_tiles * 16, records or halves of chunks] each."""
    form, n_tiles = packed.format, packed.n_tiles
    words = packed.records.cpu().numpy().view(np.uint32).reshape(n_tiles, -1, 8, packed.format.record_words)  # tile, record, g, word

    def by_output(values: NDArray[np.generic]) -> NDArray[np.float64]:
        """[tile, record, g, r, ...] -> [outputs, records * ...]"""
        return values.astype(np.float64).transpose(0, 3, 2, 1, *range(4, values.ndim)).reshape(n_tiles * TILE, -1)

    if form in (Format.Q8_G, Format.F8_G):
        scale = by_output(words.view(np.float32))
        return scale, np.zeros_like(scale)
    if form is Format.Q4_K:
        small = words.view(np.uint8).reshape(*words.shape[:3], 2, 4).astype(np.float64)  # tile, chunk, g, p, (scale, least) x r
        d = packed.supers.cpu().numpy().view(np.float16).reshape(n_tiles, -1, 8, 2, 2).astype(np.float64)  # tile, super, g, d or dmin, r
        d = d.repeat(4, axis=1)[:, : words.shape[1]]
        scale = small[..., 0:2].transpose(0, 1, 2, 4, 3) * d[:, :, :, 0, :, None]
        least = -small[..., 2:4].transpose(0, 1, 2, 4, 3) * d[:, :, :, 1, :, None]
        return by_output(scale), by_output(least)
    halves = words.view(np.float16).reshape(*words.shape, 2).astype(np.float64)  # tile, record, g, word, r
    if form is Format.Q4_Z:
        return by_output(halves[..., 0, :]), by_output(-halves[..., 0, :] * halves[..., 1, :])
    if form is Format.Q4_1:
        parts = halves.reshape(*words.shape[:3], 2, 2, 2).transpose(0, 1, 2, 5, 3, 4)  # tile, chunk, g, r, p, scale or least
        return by_output(parts[..., 0]), by_output(parts[..., 1])
    scale = by_output(halves.transpose(0, 1, 2, 4, 3))
    return scale, np.zeros_like(scale)
