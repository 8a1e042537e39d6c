"""Plant each bug of `planted.py` in a copy of the CUDA kernels and run the tests of that kernel on it, in the emulator:

    python -m tests.kernels.mutants [--first N] [--count N] [--jobs N] [--record FILE]

Exits non-zero if a bug that is no equivalent was not found, an equivalent was, or a mutant does not compile. `--record` keeps what was
found, by mutant, and skips what is there already for the same sources; the last line is a summary. Source files are never touched.
"""

import argparse
import functools
import hashlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from relay.kernels.cuda_compiler import FOLDER, Program
from relay.kernels.emulator.compiler import Mode, binary
from relay.kernels.emulator.device import EmulatedDevice
from tests.kernels.planted import MUTANTS, PLANTED, TESTS, Mutant

HERE = Path(__file__).parent
LIMIT_S = 900
_NARROW = "not refused and not dtype1 and not 96 and not 128 and not 256"  # one variant to compile, and most are found by it


@dataclass
class FirstFailure:
    """What pytest tells."""

    test: str = ""
    reason: str = ""

    def pytest_configure(self, config: pytest.Config) -> None:
        config.stash[PLANTED] = True

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self.test:
            self.test = report.nodeid.split("::", 1)[1]
            lines = [line.strip() for line in str(report.longrepr).splitlines() if line.startswith("E ")]
            self.reason = _short(lines)


def _short(lines: Sequence[str]) -> str:
    text = " ".join(line.removeprefix("E").strip() for line in lines)
    told = re.search(r"does not compile|SUMMARY: \w+: [\w -]+|WARNING: ThreadSanitizer: data race|EmulatorError: [^\[]*", text)
    return (told.group() if told else text)[:120]


def digest(mutant: Mutant) -> str:
    """Of all that the result follows from."""
    found = hashlib.sha256(repr(mutant).encode())
    kernels = {FOLDER / mutant.file, *(FOLDER / f"{name[5:-3]}.cu" for name in TESTS[mutant.file]), *FOLDER.glob("*.cuh")}
    tests = [HERE / "paged.py", *(HERE / name for name in TESTS[mutant.file])]
    for path in [*sorted(kernels), *sorted((FOLDER / "emulator").glob("*.h")), *tests]:
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


def key(mutant: Mutant) -> str:
    return f"{mutant.file}: {mutant.old.strip()} -> {mutant.new.strip()}"


def plant(mutant: Mutant, folder: Path) -> None:
    """Copies of all sources, one of them changed. Raises ValueError if the text is not there once."""
    for path in FOLDER.glob("*.cu*"):
        shutil.copy(path, folder)
    text = (FOLDER / mutant.file).read_text()
    if text.count(mutant.old) != 1:
        raise ValueError(f"{mutant.old!r} occurs {text.count(mutant.old)} times in {mutant.file}")
    (folder / mutant.file).write_text(text.replace(mutant.old, mutant.new))


def run_tests(mutant: Mutant, folder: Path, result: Path) -> None:
    """In a process of its own: until the first failure."""
    EmulatedDevice._binary = lambda self, program: _binary(folder, program, self._mode)  # type: ignore[method-assign]
    os.environ["XDG_CACHE_HOME"] = str(folder)
    first, code = FirstFailure(), 0
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        for chosen in (_NARROW, "not refused"):  # what a refusal says depends on no kernel
            if not first.test:
                tests = [str(HERE / name) for name in TESTS[mutant.file]]
                code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-k", chosen, *tests], plugins=[first])
    outcome = (
        "does not compile" if "does not compile" in first.reason else "caught" if first.test else "survived" if code == 0 else "not tried"
    )
    result.write_text(json.dumps({"outcome": outcome, "test": first.test, "reason": first.reason}))


@functools.cache
def _binary(folder: Path, program: Program, mode: Mode) -> Path:
    """Each variant for itself: most mutants don't live to see the second."""
    return binary(folder / program.path.name, [program], mode)


class Trial:
    """One mutant under test, in a process of its own."""

    def __init__(self, mutant: Mutant) -> None:
        self._began = time.monotonic()
        self._kept = tempfile.TemporaryDirectory()
        folder = Path(self._kept.name)
        self._result = folder / "result"
        plant(mutant, folder)
        self._child = os.fork()
        if self._child == 0:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            run_tests(mutant, folder, self._result)
            os._exit(0)

    def outcome(self) -> dict[str, Any] | None:
        """None while it runs. outcome: caught, survived, does not compile or not tried; test and reason: what failed first."""
        seconds = round(time.monotonic() - self._began, 1)
        if os.waitpid(self._child, os.WNOHANG)[0] == 0:
            if seconds < LIMIT_S:
                return None
            self.end()
            return {"outcome": "caught", "test": "", "reason": "the tests do not end", "seconds": seconds}
        if not self._result.exists():
            found = {"outcome": "caught", "test": "", "reason": "the tests' process died"}
        else:
            found = json.loads(self._result.read_text())
        self._kept.cleanup()
        return {**found, "seconds": seconds}

    def end(self) -> None:
        """Kill it, and what it started."""
        os.killpg(self._child, signal.SIGKILL)
        os.waitpid(self._child, 0)
        self._kept.cleanup()


def try_out(mutants: Sequence[Mutant], jobs: int) -> Iterator[tuple[Mutant, dict[str, Any]]]:
    """What becomes of each, as it ends."""
    waiting, running = list(mutants), list[tuple[Mutant, Trial]]()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                mutant = waiting.pop(0)
                running.append((mutant, Trial(mutant)))
            time.sleep(0.05)
            for entry in list(running):
                outcome = entry[1].outcome()
                if outcome is not None:
                    running.remove(entry)
                    yield entry[0], outcome
    finally:
        for _, trial in running:
            trial.end()


def main() -> None:
    parser = argparse.ArgumentParser(description="Plant bugs in the CUDA kernels and see the tests find them.")
    parser.add_argument("--first", type=int, default=0, help="number of the first mutant")
    parser.add_argument("--count", type=int, default=len(MUTANTS), help="how many (default: all)")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time (default 2)")
    parser.add_argument("--record", type=Path, help="JSON file of what was found")
    given = parser.parse_args()
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    known: dict[str, Any] = json.loads(given.record.read_text()) if given.record and given.record.exists() else {}
    chosen = list(enumerate(MUTANTS))[given.first : given.first + given.count]
    new = [mutant for _, mutant in chosen if known.get(key(mutant), {}).get("digest") != digest(mutant)]
    new.sort(key=lambda mutant: bool(mutant.equivalent))  # which take longest: all tests
    for mutant, outcome in try_out(new, given.jobs):
        known[key(mutant)] = {**outcome, "digest": digest(mutant), "equivalent": mutant.equivalent}
        print(f"{outcome['outcome']:16} {outcome['seconds']:6.1f} s  {key(mutant)[:100]}  {outcome['test']}", flush=True)
        if given.record:
            in_order = {key(each): known[key(each)] for each in MUTANTS if key(each) in known}
            given.record.write_text(json.dumps(in_order, indent=1) + "\n")
    wrong = [(i, mutant) for i, mutant in chosen if known[key(mutant)]["outcome"] != ("survived" if mutant.equivalent else "caught")]
    for i, mutant in wrong:
        print(f"WRONG {i}: {known[key(mutant)]['outcome']}: {key(mutant)}")
    equivalent = sum(bool(mutant.equivalent) for _, mutant in chosen)
    caught = sum(known[key(mutant)]["outcome"] == "caught" for _, mutant in chosen)
    print(f"mutants: {caught} of {len(chosen) - equivalent} caught, {equivalent} equivalent, {len(wrong)} wrong")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
