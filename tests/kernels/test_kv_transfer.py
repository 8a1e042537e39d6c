import numpy as np
import pytest
import torch
from torch import Tensor

from relay.kernels.emulator.compiler import Mode
from relay.kernels.emulator.device import EmulatedDevice
from relay.kernels.kv_transfer import PROGRAMS, kv_checksums, kv_transfer, reference
from relay.kv.layout import KVLayout
from relay.kv.memory import KVMemory
from tests.kernels.paged import same_bits

PLAIN = EmulatedDevice(PROGRAMS)


def pool(n_layers: int, n_blocks: int, words: int, seed: int) -> Tensor:
    return torch.randint(-(2**63), 2**63 - 1, (n_layers, 2, n_blocks, words), generator=torch.Generator().manual_seed(seed))


def blocks(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


@pytest.mark.parametrize("cuda_blocks", [1, 3, 64])
@pytest.mark.parametrize(
    ("words", "layers", "from_blocks", "to_blocks"),
    [
        (2, range(1), [0], [2]),
        (96, range(1, 3), [4, 0, 2], [1, 2, 0]),
        (700, range(3), [5, -1, 3], [0, 1, 2]),
        (2050, range(2, 3), [1, 1], [0, 2]),
        (64, range(2), [], []),
        (64, range(0), [1], [1]),
    ],
)
def test_blocks_and_checksums_are_the_references(
    cuda_blocks: int, words: int, layers: range, from_blocks: list[int], to_blocks: list[int]
) -> None:
    source, target = pool(3, 6, words, 0), pool(3, 3, words, 1)
    wanted = target.clone()
    sums = torch.full((len(layers), len(from_blocks)), -1)
    want = reference(source, blocks(*from_blocks), wanted, blocks(*to_blocks), layers)
    kv_transfer(source, blocks(*from_blocks), target, blocks(*to_blocks), layers, sums, cuda_blocks=cuda_blocks, on=PLAIN)
    assert torch.equal(target, wanted)
    assert np.array_equal(sums.numpy().view(np.uint64), want)
    again = torch.zeros_like(sums)
    kv_checksums(source, blocks(*from_blocks), layers, again, on=PLAIN)
    assert torch.equal(again, sums)


def test_a_block_and_its_checksum_do_not_depend_on_the_batch_nor_on_the_grid() -> None:
    source, from_blocks, to_blocks = pool(3, 6, 300, 0), (4, 0, 2, 5), (1, 2, 0, 3)
    together, sums = pool(3, 4, 300, 1), torch.zeros(3, 4, dtype=torch.int64)
    kv_transfer(source, blocks(*from_blocks), together, blocks(*to_blocks), range(3), sums, cuda_blocks=5, on=PLAIN)
    alone, one = pool(3, 4, 300, 1), torch.zeros(1, 1, dtype=torch.int64)
    for layer in range(3):
        for i in range(4):
            kv_transfer(source, blocks(from_blocks[i]), alone, blocks(to_blocks[i]), range(layer, layer + 1), one, on=PLAIN)
            assert torch.equal(one[0, 0], sums[layer, i]), (layer, i)
    assert torch.equal(alone, together)


@pytest.mark.parametrize("mode", ["address", "thread"])
def test_sanitizers_find_nothing(mode: Mode) -> None:
    source, target = pool(2, 5, 700, 0), pool(2, 4, 700, 1)
    wanted, sums = target.clone(), torch.zeros(2, 3, dtype=torch.int64)
    want = reference(source, blocks(4, 0, 1), wanted, blocks(3, 1, 0), range(2))
    kv_transfer(source, blocks(4, 0, 1), target, blocks(3, 1, 0), range(2), sums, cuda_blocks=4, on=EmulatedDevice(PROGRAMS, mode))
    assert torch.equal(target, wanted)
    assert np.array_equal(sums.numpy().view(np.uint64), want)


def test_the_pools_of_workers_move_with_the_checksums_that_the_transport_compares() -> None:
    layout = KVLayout(n_layers=2, n_kv_heads=3, head_dim=64, block_tokens=16, dtype="bfloat16", n_blocks=5)
    ours, theirs = KVMemory(layout), KVMemory(layout)
    ours.pages[:] = np.random.default_rng(0).integers(0, 2**64, ours.pages.shape, dtype=np.uint64)
    from_blocks, to_blocks = blocks(3, 1), blocks(0, 4)
    sums = torch.zeros(2, 2, dtype=torch.int64)
    source, target = (torch.from_numpy(memory.pages.view(np.int64)) for memory in (ours, theirs))
    kv_transfer(source, from_blocks, target, to_blocks, range(2), sums, on=PLAIN)
    assert np.array_equal(sums.numpy().view(np.uint64), theirs.checksums(to_blocks.numpy()))
    assert np.array_equal(theirs.pages[:, :, [0, 4]], ours.pages[:, :, [3, 1]])


def test_gather_into_a_buffer_and_scatter_out_of_it() -> None:
    source, target, buffer = pool(2, 6, 64, 0), pool(2, 4, 64, 1), pool(2, 3, 64, 2)
    sums, in_order = torch.zeros(2, 3, dtype=torch.int64), blocks(0, 1, 2)
    kv_transfer(source, blocks(5, 2, 4), buffer, in_order, range(2), sums, on=PLAIN)
    kv_transfer(buffer, in_order, target, blocks(3, 0, 1), range(2), sums, on=PLAIN)
    assert same_bits(target[:, :, [3, 0, 1]], source[:, :, [5, 2, 4]])


@pytest.mark.parametrize(
    ("target", "to", "layers", "message"),
    [
        (pool(2, 3, 32, 0), blocks(0, 1), range(2), r"target has shape \[2, 2, 3, 32\]"),
        (pool(2, 3, 64, 0), blocks(0), range(2), "target_blocks has shape"),
        (pool(1, 3, 64, 0), blocks(0, 1), range(2), "2 of 1 layers|range"),
        (pool(2, 3, 64, 0), blocks(0, 1), range(1, 4), "checksums has shape|of 2 layers"),
    ],
)
def test_what_does_not_fit_is_refused(target: Tensor, to: Tensor, layers: range, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kv_transfer(pool(2, 6, 64, 0), blocks(0, 1), target, to, layers, torch.zeros(2, 2, dtype=torch.int64), on=PLAIN)
