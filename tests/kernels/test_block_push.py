"""Pages arrive as they were, with the checksum that the receiver computes."""

from typing import Any

import numpy as np
import pytest

from relay.kernels.block_push import copy_page, reference
from relay.kv.checksum import checksum, coefficients


@pytest.mark.parametrize("n_words", [0, 1, 3, 4, 5, 7, 768, 1027])
def test_a_page_is_copied_and_summed(n_words: int) -> None:
    rng = np.random.default_rng(n_words)
    source, table = rng.integers(0, 2**64, n_words, np.uint64), coefficients(n_words)
    target = np.zeros(n_words, np.uint64)
    assert copy_page(source, target, table) == reference(source, table)
    assert np.array_equal(source, target)


def test_k_and_v_of_a_block_sum_to_its_checksum() -> None:
    pages = np.random.default_rng(0).integers(0, 2**64, (2, 96), np.uint64)
    table, target = coefficients(192), np.zeros((2, 96), np.uint64)
    sums = [copy_page(pages[side], target[side], table[96 * side : 96 * side + 96]) for side in range(2)]
    assert sum(sums) % 2**64 == int(checksum(pages))


def test_arrays_of_different_lengths_or_types_are_refused() -> None:
    words = np.zeros(8, np.uint64)
    wrong: tuple[Any, ...] = (words[:4], words.view(np.int64), np.zeros(16, np.uint64)[::2])
    for target in wrong:
        with pytest.raises(ValueError, match="one length"):
            copy_page(words, target, words)
