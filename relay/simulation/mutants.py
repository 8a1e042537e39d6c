"""Proof that the simulation finds bugs: the product with one planted, compiled beside it. The source in the tree is never touched.

A mutant is texts that occur exactly once in their modules, and what stands there instead. It is planted before anything of the product is
imported, so each lives in a process of its own. This module imports nothing of the product.
"""

import importlib.util
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from relay.simulation.planted import MUTANTS

_GIVES_UP_S = 900.0


@dataclass(frozen=True)
class Found:
    """`seed` None: not found in `n_seeds`."""

    name: str
    seed: int | None
    law: str
    n_seeds: int
    seconds: float


def plant(name: str) -> None:
    """From now on this process has that bug. Raises ValueError if its text is not there once."""
    texts: dict[str, str] = {}
    origins: dict[str, str] = {}
    for module, old, new in MUTANTS[name]:
        if module in sys.modules:
            raise ValueError(f"{module} is imported already")
        if module not in texts:
            spec = importlib.util.find_spec(module)
            assert spec is not None
            assert spec.origin is not None
            origins[module], texts[module] = spec.origin, Path(spec.origin).read_text()
        if texts[module].count(old) != 1:
            raise ValueError(f"{name}: {old!r} occurs {texts[module].count(old)} times in {module}")
        texts[module] = texts[module].replace(old, new)
    for module, text in texts.items():
        spec = importlib.util.spec_from_file_location(module, origins[module])
        assert spec is not None
        made = sys.modules[module] = importlib.util.module_from_spec(spec)
        exec(compile(text, f"<{name}>", "exec"), made.__dict__)
        parent, _, child = module.rpartition(".")
        setattr(importlib.import_module(parent), child, made)


def try_out(name: str, n_seeds: int, first: int) -> Found:
    """In a process of its own, until it is found or the seeds are used up."""
    command = [sys.executable, "-m", "relay.simulation", "--mutant", name, "--seeds", str(n_seeds), "--first", str(first), "--jobs", "1"]
    began = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIVES_UP_S, check=False)
    except subprocess.TimeoutExpired:
        return Found(name, first, "never ends", n_seeds, time.monotonic() - began)
    seconds = time.monotonic() - began
    found = re.search(r"^seed (\d+): ([^:]*):", done.stdout, re.MULTILINE)
    if found is not None:
        return Found(name, int(found[1]), found[2], n_seeds, seconds)
    if done.returncode != 0:
        raise RuntimeError(f"{name}: {done.stderr[-2000:]}")
    return Found(name, None, "", n_seeds, seconds)


def table(n_seeds: int, first: int, jobs: int) -> int:
    """Print which are found; returns how many are not."""
    missed = 0
    with ThreadPoolExecutor(jobs) as pool:
        for found in pool.map(lambda name: try_out(name, n_seeds, first), MUTANTS):
            missed += found.seed is None
            where = f"seed {found.seed:<5d} {found.law}" if found.seed is not None else f"not in {n_seeds} seeds"
            print(f"{found.name:64s} {where}", flush=True)
    print(f"{len(MUTANTS) - missed} of {len(MUTANTS)} planted bugs found within {n_seeds} seeds")
    return missed
