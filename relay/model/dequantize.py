"""Packed rows into float32: what the numbers in a file mean, bit for bit as the format's own reference computes them.

In: a `PackedMatrix`. Out: float32 numbers in memory that the caller gives, so that a model is never there twice. Block formats:
https://github.com/ggml-org/ggml (ggml-common.h); d, m, dmin are float16, and products are rounded in the order written.
"""

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from relay.model.packed import BLOCKS, PackedMatrix

_CHUNK_NUMBERS: Final = 4 << 20  # unpacked at once: what is needed beside the result


def dequantize(matrix: PackedMatrix, out: Tensor) -> None:
    """out: float32 [n_out, n_in], contiguous; all of it is written."""
    _, block_bytes = BLOCKS[matrix.type]
    unpack = _UNPACK[matrix.type]
    step = max(1, _CHUNK_NUMBERS // matrix.n_in)
    for begin in range(0, matrix.n_out, step):
        rows = matrix.rows[begin : begin + step]
        if rows.ctypes.data % 8:  # a file may align its tensors as it likes
            rows = rows.copy()
        blocks = torch.from_numpy(rows).view(-1, block_bytes)
        into = out[begin : begin + step]
        into.copy_(unpack(blocks).view(into.shape))


def _f32(blocks: Tensor) -> Tensor:
    return blocks.view(torch.float32)


def _f16(blocks: Tensor) -> Tensor:
    return blocks.view(torch.float16)


def _bf16(blocks: Tensor) -> Tensor:
    return blocks.view(torch.bfloat16)


def _q8_0(blocks: Tensor) -> Tensor:
    """32 numbers: d, int8 q[32]; q d."""
    return blocks[:, 2:].view(torch.int8).float().mul_(_half(blocks, 0))


def _q4_0(blocks: Tensor) -> Tensor:
    """32 numbers: d, then 16 bytes: numbers 0 to 15 in the low nibbles, 16 to 31 in the high ones; (q - 8) d."""
    return _nibbles(blocks[:, 2:], 16).view(-1, 32).sub_(8.0).mul_(_half(blocks, 0))


def _q4_1(blocks: Tensor) -> Tensor:
    """32 numbers: d, m, then nibbles as in Q4_0; q d + m."""
    return _nibbles(blocks[:, 4:], 16).view(-1, 32).mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q4_k(blocks: Tensor) -> Tensor:
    """256 numbers in 8 groups: d, dmin, 8 scales and 8 minima of 6 bits in 12 bytes, then 4 times 32 bytes that hold the numbers of two
    groups: low nibbles, high nibbles; (d scale) q - dmin minimum."""
    return _scaled(blocks, _nibbles(blocks[:, 16:], 32).view(-1, 8, 32))


def _q5_k(blocks: Tensor) -> Tensor:
    """As Q4_K, with a fifth bit: 32 bytes before the nibbles, of which bit g belongs to group g."""
    fifth = blocks[:, 16:48].unsqueeze(1) >> _shifts(8)[:, None] & 1
    return _scaled(blocks, _nibbles(blocks[:, 48:], 32).view(-1, 8, 32).add_(fifth * 16))


def _q6_k(blocks: Tensor) -> Tensor:
    """256 numbers in 16 groups: 128 bytes of low nibbles, 64 of upper bit pairs, 16 int8 scales, d; (d scale) (q - 32).

    Each half of the numbers has 64 of the former bytes, low nibbles of all before high ones, and 32 of the latter, pair after pair."""
    low = _nibbles(blocks[:, :128], 64).view(-1, 2, 4, 32)
    high = blocks[:, 128:192].view(-1, 2, 1, 32) >> (2 * _shifts(4))[:, None] & 3
    q = low.add_(high * 16).sub_(32.0).view(-1, 16, 16)
    scales = blocks[:, 192:208].view(torch.int8).float().mul_(_half(blocks, 208))
    return q.mul_(scales[:, :, None])


def _scaled(blocks: Tensor, q: Tensor) -> Tensor:
    """q: float32 [n, 8, 32], changed in place. The 12 bytes at 4: for groups 0 to 3 the low 6 bits of bytes 0 to 3 (scales) and 4 to 7
    (minima); for groups 4 to 7 the nibbles of bytes 8 to 11, with the two highest bits of bytes 0 to 3 and 4 to 7 above them."""
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), 1)
    minima = torch.cat((second & 63, third >> 4 | second >> 6 << 4), 1)
    d = scales.float().mul_(_half(blocks, 0))[:, :, None]
    m = minima.float().mul_(_half(blocks, 2))[:, :, None]
    return q.mul_(d).sub_(m)


def _nibbles(packed: Tensor, width: int) -> Tensor:
    """packed: uint8 [n, k * width] -> float32 [n, k, 2, width]: of each `width` bytes the low nibbles, then the high ones."""
    low_first = packed.reshape(len(packed), -1, 1, width)
    out = torch.empty(len(packed), low_first.shape[1], 2, width)
    out[:, :, 0] = (low_first & 15)[:, :, 0]
    out[:, :, 1] = (low_first >> 4)[:, :, 0]
    return out


def _shifts(n: int) -> Tensor:
    return torch.arange(n, dtype=torch.uint8)


def _half(blocks: Tensor, at: int) -> Tensor:
    """The float16 that begins at byte `at` of each block: float32 [n_blocks, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


_UNPACK: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
