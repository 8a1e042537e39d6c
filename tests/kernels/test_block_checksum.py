"""The sums of blocks where they lie are those that a push made of them."""

from typing import Any

import numpy as np
import pytest

from relay.kernels.block_checksum import block_checksums, reference
from relay.kernels.block_push import copy_page
from relay.kv.checksum import coefficients


def pool(n_layers: int, n_blocks: int, n_words: int) -> Any:
    return np.random.default_rng(n_words).integers(0, 2**64, (n_layers, 2, n_blocks, n_words), np.uint64)


@pytest.mark.parametrize("n_words", [1, 7, 8, 9, 768])
@pytest.mark.parametrize("blocks", [[], [0], [4, 0, 2], [4, 4]])
def test_blocks_are_summed_in_any_order(n_words: int, blocks: list[int]) -> None:
    pages, numbers = pool(3, 5, n_words), np.asarray(blocks, np.int32)
    assert np.array_equal(block_checksums(pages, numbers), reference(pages, numbers))


def test_they_are_the_sums_of_a_push() -> None:
    pages, table = pool(2, 3, 96), coefficients(192)
    sent = [
        [
            sum(copy_page(layer[side, block], np.zeros(96, np.uint64), table[96 * side : 96 * side + 96]) for side in (0, 1))
            for block in (2, 0)
        ]
        for layer in pages
    ]
    assert block_checksums(pages, np.asarray([2, 0], np.int32)).tolist() == [[each % 2**64 for each in row] for row in sent]


def test_what_is_no_pool_or_outside_of_it_is_refused() -> None:
    pages = pool(2, 3, 8)
    for wrong in (pages.view(np.int64), pages[:, :1], pages[:, :, ::2]):
        with pytest.raises(ValueError, match="contiguous uint64"):
            block_checksums(wrong, np.asarray([0], np.int32))
    for block in (-1, 3):
        with pytest.raises(ValueError, match="0 to 2"):
            block_checksums(pages, np.asarray([block], np.int32))
