"""Copy blocks of some layers between KV pools, straight into a peer's memory, with each block's checksum in the same pass.

    target[layer, side, target_blocks[i]] = source[layer, side, source_blocks[i]]
    checksums[layer - first, i] = sum over w of word[w] * (splitmix64(w) | 1) mod 2^64      words of K, then of V: relay.kv.checksum

    source, target      [n_layers, 2 (K, V), n_blocks, words]          int64, the pool's bytes; n_blocks may differ; words even
    *_blocks            [n]                                            int32; source -1: skipped, checksum 0
    checksums           [len(layers), n]                               int64, as numpy's uint64

One launch moves a whole group of layers with no descriptor per page. The target is what `cudaIpcOpenMemHandle` mapped, or a staging buffer
for a network whose blocks are 0 to n - 1 (gather), or the source is (scatter). It orders nothing by itself: an event after it does.
"""

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from relay.kernels.cuda_compiler import Program
from relay.kernels.cuda_library import CUDA, Device, Launch
from relay.kernels.tensor_check import expect
from relay.kv.checksum import checksum

PROGRAMS: Final = (Program("kv_transfer"),)
MOST_CUDA_BLOCKS: Final = 64
_LAUNCH: Final = Launch(PROGRAMS[0], "kv_transfer")
_THREADS: Final = 256


def kv_transfer(
    source: Tensor,
    source_blocks: Tensor,
    target: Tensor,
    target_blocks: Tensor,
    layers: range,
    checksums: Tensor,
    *,
    cuda_blocks: int = MOST_CUDA_BLOCKS,
    on: Device = CUDA,
) -> None:
    """Copy and sum. `cuda_blocks`: how much of the device it may take from a step that computes meanwhile. Raises ValueError."""
    expect("target", target, (None, 2, None, source.shape[-1]), torch.int64, on)
    expect("target_blocks", target_blocks, source_blocks.shape, torch.int32, on)
    _launch(source, source_blocks, target, target_blocks, layers, checksums, cuda_blocks, on)


def kv_checksums(
    source: Tensor, blocks: Tensor, layers: range, checksums: Tensor, *, cuda_blocks: int = MOST_CUDA_BLOCKS, on: Device = CUDA
) -> None:
    """Only sum: what a receiver compares with. Raises ValueError."""
    _launch(source, blocks, None, None, layers, checksums, cuda_blocks, on)


def _launch(
    source: Tensor,
    source_blocks: Tensor,
    target: Tensor | None,
    target_blocks: Tensor | None,
    layers: range,
    checksums: Tensor,
    cuda_blocks: int,
    on: Device,
) -> None:
    expect("source", source, (None, 2, None, None), torch.int64, on)
    expect("source_blocks", source_blocks, (None,), torch.int32, on)
    n, words = len(source_blocks), source.shape[-1]
    expect("checksums", checksums, (len(layers), n), torch.int64, on)
    n_layers = min(len(source), len(source if target is None else target))
    if layers.step != 1 or layers.start < 0 or layers.stop > n_layers or words % 2 or cuda_blocks < 1:
        raise ValueError(
            f"{layers} of {n_layers} layers, {words} words, {cuda_blocks} CUDA blocks; expected layers that are there, even words"
        )
    n_items = n * len(layers)
    if n_items == 0:
        return
    i32 = np.int32
    n_target = 0 if target is None else target.shape[2]
    shape = (i32(n), i32(layers.start), i32(len(layers)), i32(source.shape[2]), i32(n_target), i32(words // 2))
    on.launch(_LAUNCH, (min(cuda_blocks, n_items), 1, 1), _THREADS, (source, source_blocks, target, target_blocks, checksums, *shape))


def reference(source: Tensor, source_blocks: Tensor, target: Tensor, target_blocks: Tensor, layers: range) -> NDArray[np.uint64]:
    """The same in numpy and torch; returns the checksums: uint64 [len(layers), n]."""
    there = source_blocks >= 0
    blocks, to = source_blocks[there].long(), target_blocks[there].long()
    sums = np.zeros((len(layers), len(source_blocks)), np.uint64)
    for i, layer in enumerate(layers):
        pages = source[layer][:, blocks]
        target[layer][:, to] = pages
        sums[i, there.numpy()] = checksum(pages.transpose(0, 1).numpy().view(np.uint64))
    return sums
