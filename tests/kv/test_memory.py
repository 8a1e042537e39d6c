"""Pools as shared memory, and the checksum that a push must survive."""

import os

import numpy as np
import pytest

from relay.kv.checksum import checksum, coefficients
from relay.kv.layout import KVLayout
from relay.kv.memory import KVMemory, create

LAYOUT = KVLayout(n_layers=3, n_kv_heads=2, head_dim=4, block_tokens=16, dtype="float32", n_blocks=5)


def filled(layout: KVLayout, seed: int = 0) -> KVMemory:
    memory = KVMemory(layout)
    memory.pages[:] = np.random.default_rng(seed).integers(0, 1 << 63, memory.pages.shape, dtype=np.uint64)
    return memory


def test_sizes_add_up() -> None:
    assert LAYOUT.page_bytes == 2 * 16 * 4 * 4
    assert LAYOUT.pool_bytes == 3 * 2 * 5 * LAYOUT.page_bytes
    assert [LAYOUT.blocks_for(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]


def test_two_mappings_of_one_memfd_see_the_same_bytes() -> None:
    fd = create("test", LAYOUT.pool_bytes)
    ours, theirs = KVMemory(LAYOUT, os.dup(fd)), KVMemory(LAYOUT, fd)
    ours.pages[2, 1, 4, 3] = 77
    assert theirs.pages[2, 1, 4, 3] == 77


def test_a_pool_cannot_be_resized_under_its_readers() -> None:
    fd = create("test", LAYOUT.pool_bytes)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 1)
    os.close(fd)


def test_a_push_moves_blocks_and_their_checksums_agree() -> None:
    source, target = filled(LAYOUT), KVMemory(LAYOUT)
    blocks, into = np.asarray([3, 0], dtype=np.int32), np.asarray([1, 4], dtype=np.int32)
    for layer in range(3):
        source.copy_layer(layer, blocks, target, into)
    assert (target.checksums(into) == source.checksums(blocks)).all()
    assert (target.pages[:, :, [1, 4]] == source.pages[:, :, [3, 0]]).all()
    assert not target.pages[:, :, [0, 2, 3]].any()


def test_every_flipped_bit_changes_the_checksum() -> None:
    memory = filled(LAYOUT)
    blocks = np.asarray([2], dtype=np.int32)
    before = memory.checksums(blocks)
    for layer in range(3):
        for which in range(2):
            for word in range(0, LAYOUT.page_bytes // 8, 7):
                memory.pages[layer, which, 2, word] ^= np.uint64(1 << (word % 64))
                after = memory.checksums(blocks)
                memory.pages[layer, which, 2, word] ^= np.uint64(1 << (word % 64))
                assert (after != before).sum() == 1
                assert after[layer, 0] != before[layer, 0]


def test_swapped_words_and_swapped_pages_change_the_checksum() -> None:
    pages = np.random.default_rng(1).integers(0, 1 << 63, (2, 64), dtype=np.uint64)
    swapped = pages.copy()
    swapped[0, [3, 9]] = swapped[0, [9, 3]]
    assert checksum(swapped) != checksum(pages)
    assert checksum(pages[::-1]) != checksum(pages)


def test_coefficients_are_odd_and_a_longer_table_begins_with_the_shorter() -> None:
    assert (coefficients(100) & np.uint64(1)).all()
    assert (coefficients(200)[:100] == coefficients(100)).all()
    assert int(coefficients(1)[0]) == 0xE220A8397B1DCDAF  # splitmix64(0), odd already
