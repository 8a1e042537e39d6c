"""`python -m relay.simulation`: play seeds; replay one with its trace; show which planted bugs are found."""

import argparse
import importlib
import os
import sys

from relay.simulation.mutants import plant, table
from relay.simulation.planted import MUTANTS


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/simulate", description=__doc__)
    parser.add_argument("--seeds", type=int, default=300, help="how many (default 300)")
    parser.add_argument("--first", type=int, default=0, help="the first one (default 0)")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes (default: one per core)")
    parser.add_argument("--trace", action="store_true", help="play the first seed only, and print every event of it")
    parser.add_argument("--mutants", action="store_true", help="plant every bug in turn: which are found, when, and by which law")
    parser.add_argument("--mutant", choices=list(MUTANTS), help="plant this bug, and stop where it is found")
    asked = parser.parse_args()
    if asked.mutants:
        return table(asked.seeds, asked.first, asked.jobs)
    if asked.mutant:
        plant(asked.mutant)
    if asked.trace:
        return trace(asked.first)
    sweep = importlib.import_module("relay.simulation.sweep").sweep  # not before a bug is planted
    total = sweep(asked.first, asked.seeds, asked.jobs, stop_at=1 if asked.mutant else 0)
    print(total.summary())
    return 1 if total.broken else 0


def trace(seed: int) -> int:
    world = importlib.import_module("relay.simulation.world")
    violation = importlib.import_module("relay.simulation.violation").Violation
    log: list[str] = []
    try:
        outcome = world.simulate(seed, log)
    except violation as error:
        print("\n".join(log))
        print(f"seed {seed}: {error}")
        return 1
    print("\n".join(log))
    print(f"seed {seed}: {outcome}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
