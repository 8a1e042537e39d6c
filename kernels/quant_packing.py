"""From the rows of a file to what `quant_matvec` streams through: the same numbers in another order. Nothing is rounded.

    pack_gguf(Format.Q4_K, rows, n_in)                  rows: uint8 [n_out, bytes of a row], as in the file; Q4_0, Q4_1, Q4_K, Q8_0
    pack_awq(qweight, qzeros, scales)                   int32 [n_in, n_out / 8], int32 [n_groups, n_out / 8], fp16 [n_groups, n_out]
    pack_gptq(qweight, qzeros, scales)                  int32 [n_in / 8, n_out], likewise; zero points stored less one unless said otherwise
    pack_int8(weights, scales), pack_fp8(...)           int8 or e4m3 [n_out, n_in], float32 scales [n_out] or [n_out, n_groups]

Layouts: quant_matvec.py. Outputs are filled up to 32 with zeros. Raises ValueError for what the kernel does not compute: n_in that is no
multiple of 64, groups likewise, NaN. Sources: ggml's quantization blocks; AutoAWQ's and AutoGPTQ's tensors.
"""

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from relay.kernels.quant_matvec import CHUNK, TILE, Format, Packed

_OUTPUTS: Final = 32
_AWQ_ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of a word is this output
_BLOCKS: Final = {Format.Q4_0: (32, 18), Format.Q4_1: (32, 20), Format.Q4_K: (256, 144), Format.Q8_0: (32, 34)}  # inputs, bytes

Bytes = NDArray[np.uint8]
Halves = NDArray[np.float16]


def pack_gguf(form: Format, rows: Bytes, n_in: int) -> Packed:
    """rows: uint8 [n_out, bytes of a row]."""
    inputs, n_bytes = _BLOCKS[form]
    if n_in % inputs or rows.ndim != 2 or rows.shape[1] != n_in // inputs * n_bytes or rows.dtype != np.uint8:
        raise ValueError(f"rows of {n_in} inputs in {form.value} are whole blocks of {inputs}, {n_bytes} bytes each; got {rows.shape}")
    if n_in % CHUNK:
        raise ValueError(f"rows have {n_in} inputs; expected multiples of {CHUNK}")
    blocks = rows.reshape(len(rows), -1, n_bytes)
    if form is Format.Q4_K:
        return _pack_q4_k(blocks, n_in)
    n_halves = 2 if form is Format.Q4_1 else 1
    halves = np.ascontiguousarray(blocks[..., : 2 * n_halves]).view(np.float16)  # [n_out, blocks, scale (and least)]
    body = blocks[..., 2 * n_halves :]
    codes = body if form is Format.Q8_0 else np.concatenate((body & 15, body >> 4), -1)
    per_chunk = _by_tile(halves.reshape(len(rows), -1, 2, n_halves))  # tile, r, g, chunk, p, scale or least
    records = per_chunk.transpose(0, 3, 2, 4, 5, 1)  # tile, chunk, g, p, scale or least, r
    return _packed(form, codes.reshape(len(rows), n_in), records, CHUNK)


def _pack_q4_k(blocks: Bytes, n_in: int) -> Packed:
    n_out, n_blocks, _ = blocks.shape
    d = np.ascontiguousarray(blocks[..., :4]).view(np.float16)  # [n_out, blocks, d or dmin]
    low, high, mixed = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scale = np.concatenate((low & 63, mixed & 15 | (low >> 6) << 4), -1)  # [n_out, blocks, 8]
    least = np.concatenate((high & 63, mixed >> 4 | (high >> 6) << 4), -1)
    body = blocks[..., 16:].reshape(n_out, n_blocks, 4, 1, 32)
    codes = np.concatenate((body & 15, body >> 4), 3).reshape(n_out, n_in)
    both = np.stack((scale, least), -1).reshape(n_out, n_blocks * 4, 2, 2)  # chunk, p, scale or least
    records = _by_tile(both).transpose(0, 3, 2, 4, 5, 1)  # tile, chunk, g, p, scale or least, r
    supers = _by_tile(d).transpose(0, 3, 2, 4, 1)  # tile, block, g, d or dmin, r
    return _packed(Format.Q4_K, codes, records, CHUNK, supers)


def pack_awq(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> Packed:
    """The zero points are as stored."""
    return _pack_zeros(_awq_nibbles(qweight).T, _awq_nibbles(qzeros).T, scales)


def pack_gptq(qweight: Tensor, qzeros: Tensor, scales: Tensor, *, stored_less: int = 1) -> Packed:
    """Inputs in order: a file with a shuffled `g_idx` is not for this. stored_less: 0 for files of the second version of the format."""
    words = qweight.numpy().view(np.uint32)
    codes = (words[:, None, :] >> _shifts()[None, :, None] & 15).reshape(-1, words.shape[1]).astype(np.uint8)
    zero_words = qzeros.numpy().view(np.uint32)
    zeros = (zero_words[:, :, None] >> _shifts() & 15).reshape(len(zero_words), -1)
    return _pack_zeros(codes.T, zeros.T + stored_less, scales)


def pack_int8(weights: Tensor, scales: Tensor) -> Packed:
    """weights: int8 [n_out, n_in]; scales: float32 [n_out], or [n_out, n_groups]."""
    return _pack_8(Format.Q8_G, weights.numpy().view(np.uint8), scales)


def pack_fp8(weights: Tensor, scales: Tensor) -> Packed:
    """weights: float8_e4m3fn [n_out, n_in]; scales as above; a scale for 128 x 128 weights is one for each of their rows."""
    codes = weights.view(torch.uint8).numpy()
    if (codes & 127 == 127).any():
        raise ValueError("the weights have NaN among them; expected numbers")
    return _pack_8(Format.F8_G, codes, scales)


def _pack_8(form: Format, codes: Bytes, scales: Tensor) -> Packed:
    groups = scales.float().reshape(len(codes), -1).numpy()  # [n_out, n_groups]
    n_in = codes.shape[1]
    group = n_in if groups.shape[1] == 1 else -(-n_in // groups.shape[1] // CHUNK) * CHUNK
    if -(-n_in // group) != groups.shape[1]:
        raise ValueError(f"{groups.shape[1]} scales for {n_in} inputs; expected one for each group of a multiple of {CHUNK}")
    return _packed(form, codes, _by_tile(groups).transpose(0, 3, 2, 1), group)


def _pack_zeros(codes: Bytes, zeros: NDArray[np.generic], scales: Tensor) -> Packed:
    """codes: [n_out, n_in]; zeros: [n_out, n_groups]; scales: [n_groups, n_out]."""
    if scales.dtype != torch.float16:
        raise ValueError(f"scales are {scales.dtype}; expected torch.float16")
    halves = np.stack((scales.numpy().T, zeros.astype(np.float16)), -1)  # [n_out, n_groups, scale or zero]
    n_in, n_groups = codes.shape[1], halves.shape[1]
    if n_in % n_groups:
        raise ValueError(f"{n_groups} groups of {n_in} inputs; expected whole ones")
    return _packed(Format.Q4_Z, codes, _by_tile(halves).transpose(0, 3, 2, 4, 1), n_in // n_groups)


def _packed(form: Format, codes: Bytes, records: NDArray[np.generic], group: int, supers: NDArray[np.generic] | None = None) -> Packed:
    """codes: [n_out, n_in]; records and supers as they lie in memory."""
    n_out, n_in = codes.shape
    if n_in % CHUNK or group % CHUNK:
        raise ValueError(f"{n_in} inputs in groups of {group}; expected multiples of {CHUNK}")
    k = _by_tile(codes).reshape(-1, 2, 8, n_in // CHUNK, 2, 4, 2, 2, 2)  # tile, r, g, chunk, p, t, s, h, e
    if form.has_four_bits:
        nibbles = k.transpose(0, 3, 2, 5, 4, 6, 8, 7, 1).reshape(*(k.shape[i] for i in (0, 3, 2, 5, 4, 6)), 8).astype(np.uint32)
        laid = np.bitwise_or.reduce(nibbles << _shifts(), axis=-1)
    else:
        laid = k.transpose(0, 3, 4, 2, 5, 6, 7, 1, 8)
    return Packed(form, n_out, n_in, group, _flat(laid, np.uint8), _flat(records, np.int32), _flat(supers, np.int32))


def _by_tile(values: NDArray[np.generic]) -> NDArray[np.generic]:
    """[n_out, ...] -> [tiles, r, g, ...], filled up with zeros."""
    full = np.pad(values, ((0, -len(values) % _OUTPUTS), *((0, 0),) * (values.ndim - 1)))
    return full.reshape(-1, 2, TILE // 2, *values.shape[1:])


def _flat(values: NDArray[np.generic] | None, dtype: type[np.generic]) -> Tensor:
    if values is None:
        return torch.zeros(0, dtype=torch.int32)
    return torch.from_numpy(np.ascontiguousarray(values).reshape(-1).view(dtype))


def _awq_nibbles(words: Tensor) -> Bytes:
    """int32 [n, n_out / 8] -> [n, n_out]."""
    nibbles = words.numpy().view(np.uint32)[..., None] >> _shifts() & 15
    out = np.empty(nibbles.shape, np.uint8)
    out[..., _AWQ_ORDER] = nibbles
    return out.reshape(len(out), -1)


def _shifts() -> NDArray[np.uint32]:
    return np.arange(0, 32, 4, dtype=np.uint32)
