"""Uniform, independent, and the same for ever: tokens drawn again after a failure must be the tokens drawn before."""

import numpy as np
import pytest

from relay.engine.keyed_random import uniform

KNOWN = (0.13870941014555427, 0.358059860541451, 0.14119421699853907)


def test_known_values_never_change() -> None:
    assert uniform(0, 0, 0) == KNOWN[0]
    assert uniform(42, 1, 100) == KNOWN[1]
    assert uniform(-1, 0, 7) == uniform(2**64 - 1, 0, 7) == KNOWN[2]


@pytest.mark.parametrize("key", ["seed", "choice", "position"])
def test_numbers_along_each_part_of_the_key_are_uniform_and_uncorrelated(key: str) -> None:
    n = 20_000
    keys = {"seed": 3, "choice": 0, "position": 17}
    drawn = np.array([uniform(**{**keys, key: i}) for i in range(n)])
    assert ((drawn >= 0) & (drawn < 1)).all()
    assert len(np.unique(drawn)) == n
    counts, _ = np.histogram(drawn, bins=64, range=(0, 1))
    assert ((counts - n / 64) ** 2).sum() / (n / 64) < 121  # chi-square with 63 degrees of freedom exceeds it once in 10^5
    for lag in (1, 2, 3, 8, 64):
        assert abs(np.corrcoef(drawn[:-lag], drawn[lag:])[0, 1]) < 5 / n**0.5


def test_parts_of_the_key_do_not_stand_in_for_each_other() -> None:
    grid = np.array([[[uniform(s, c, p) for p in range(16)] for c in range(16)] for s in range(16)])
    assert len(np.unique(grid)) == grid.size


def test_one_changed_bit_of_a_key_changes_half_of_the_result() -> None:
    flips = []
    for bit in range(64):
        for seed, choice, position in ((1 << bit, 0, 0), (0, 1 << bit, 0), (0, 0, 1 << bit)):
            for base in range(20):
                words = (int(uniform(*key) * 2**53) for key in ((base, base, base), (base ^ seed, base ^ choice, base ^ position)))
                flips.append((next(words) ^ next(words)).bit_count())
    assert abs(np.mean(flips) - 26.5) < 0.4  # of 53 bits; the mean of 3840 has a standard deviation of 0.06
    assert min(flips) > 5
