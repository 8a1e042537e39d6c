"""Seeds that hold, seeds that replay, and seeds that once found a bug."""

import os
import subprocess
import sys

import pytest

from relay.simulation.sweep import sweep
from relay.simulation.world import simulate

_REPLAY = "from relay.simulation.world import simulate\nfor seed in range({first}, {last}): print(simulate(seed).digest)"


def test_no_law_is_broken_in_200_seeds() -> None:
    """`scripts/simulate --first SEED --trace` shows what happened in one that is printed here."""
    total = sweep(0, 200, len(os.sched_getaffinity(0)))
    assert total.broken == []
    assert total.n_seeds == 200
    assert total.outcomes["answered"] > 500
    assert total.n_deaths > 150, "or it proves little"


@pytest.mark.parametrize("hash_seed", ["0", "77"])
def test_a_seed_plays_the_same_in_every_process(hash_seed: str) -> None:
    here = [simulate(seed).digest for seed in range(20, 26)]
    there = subprocess.run(
        [sys.executable, "-c", _REPLAY.format(first=20, last=26)],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=True,
    )
    assert there.stdout.split() == here
    assert len(dict.fromkeys(here)) == 6


def test_keeping_a_log_changes_nothing() -> None:
    log: list[str] = []
    assert simulate(7, log).digest == simulate(7).digest
    assert len(log) > 50
