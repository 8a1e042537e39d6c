"""Many seeds, on several processes, into one table of what was broken."""

import itertools
import multiprocessing
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from relay.simulation.violation import Violation
from relay.simulation.world import Outcome, simulate


@dataclass
class Total:
    """`broken`: (seed, law, text) of each violation."""

    n_seeds: int = 0
    broken: list[tuple[int, str, str]] = field(default_factory=list)
    n_events: int = 0
    n_deaths: int = 0
    n_struck: int = 0
    n_retries: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)

    def add(self, outcome: Outcome) -> None:
        self.n_events += outcome.n_events
        self.n_deaths += outcome.n_deaths
        self.n_struck += outcome.n_struck
        self.n_retries += outcome.n_retries
        self.outcomes.update(outcome.outcomes)
        self.errors.update(outcome.errors)

    def summary(self) -> str:
        """The last line that is printed."""
        requests = ", ".join(f"{n} {what}" for what, n in sorted(self.outcomes.items()))
        errors = ", ".join(f"{n} {code}" for code, n in sorted(self.errors.items()))
        return (
            f"{self.n_seeds} seeds, {len(self.broken)} violations; {self.n_struck} faults, {self.n_deaths} deaths, "
            f"{self.n_retries} retries, {self.n_events} events; requests: {requests or 'none'}; typed errors: {errors or 'none'}"
        )


def _play(seed: int) -> tuple[int, Outcome | tuple[str, str]]:
    try:
        return seed, simulate(seed)
    except Violation as violation:
        return seed, (violation.law, str(violation))


def sweep(first: int, n: int, jobs: int, *, stop_at: int = 0, tell: Callable[[str], None] = print) -> Total:
    """Play seeds `first` to `first + n - 1`. `stop_at` violations end it early, 0 for never."""
    total = Total()
    for seed, result in _played(range(first, first + n), jobs):
        total.n_seeds += 1
        if isinstance(result, Outcome):
            total.add(result)
        else:
            total.broken.append((seed, *result))
            tell(f"seed {seed}: {result[1]}")
            if len(total.broken) == stop_at:
                break
    return total


def _played(seeds: range, jobs: int) -> Iterator[tuple[int, Outcome | tuple[str, str]]]:
    if jobs == 1:
        yield from map(_play, seeds)
        return
    with multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn").Pool(jobs) as pool:
        yield from pool.imap_unordered(_play, itertools.chain(seeds), chunksize=10)
