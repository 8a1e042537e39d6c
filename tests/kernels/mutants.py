"""Plant each bug of `planted.py` in a copy of the CUDA kernels and run the tests of that kernel on it, in the emulator:

    python -m tests.kernels.mutants [--first N] [--count N] [--record FILE]

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
from collections.abc import Sequence
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
    first = FirstFailure()
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        for chosen in (_NARROW, "not refused"):  # what a refusal says depends on no kernel
            if not first.test:
                tests = [str(HERE / name) for name in TESTS[mutant.file]]
                pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-k", chosen, *tests], plugins=[first])
    result.write_text(json.dumps({"test": first.test, "reason": first.reason}))


@functools.cache
def _binary(folder: Path, program: Program, mode: Mode) -> Path:
    """Each variant for itself: most mutants don't live to see the second."""
    return binary(folder / program.path.name, [program], mode)


def try_out(mutant: Mutant) -> dict[str, Any]:
    """outcome: caught, survived, or does not compile; test and reason: what failed first."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plant(mutant, folder)
        result = folder / "result"
        child = os.fork()
        if child == 0:
            os.setsid()
            run_tests(mutant, folder, result)
            os._exit(0)
        while os.waitpid(child, os.WNOHANG)[0] == 0:
            time.sleep(0.05)
            if time.monotonic() - began > LIMIT_S:
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
                break
        found = json.loads(result.read_text()) if result.exists() else {"test": "", "reason": "the tests' process died, or did not end"}
    compiled = "does not compile" not in found["reason"]
    outcome = "does not compile" if not compiled else "caught" if found["test"] or found["reason"] else "survived"
    return {"outcome": outcome, **found, "seconds": round(time.monotonic() - began, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Plant bugs in the CUDA kernels and see the tests find them.")
    parser.add_argument("--first", type=int, default=0, help="number of the first mutant")
    parser.add_argument("--count", type=int, default=len(MUTANTS), help="how many (default: all)")
    parser.add_argument("--record", type=Path, help="JSON file of what was found")
    given = parser.parse_args()
    torch.set_num_threads(1)
    known: dict[str, Any] = json.loads(given.record.read_text()) if given.record and given.record.exists() else {}
    wrong = caught = equivalent = 0
    for i, mutant in list(enumerate(MUTANTS))[given.first : given.first + given.count]:
        key = f"{mutant.file}: {mutant.old.strip()} -> {mutant.new.strip()}"
        entry = known.get(key)
        if entry is None or entry["digest"] != digest(mutant):
            entry = {**try_out(mutant), "digest": digest(mutant)}
            if mutant.equivalent:
                entry["equivalent"] = mutant.equivalent
            known[key] = entry
            if given.record:
                given.record.write_text(json.dumps(known, indent=1) + "\n")
        is_right = entry["outcome"] == ("survived" if mutant.equivalent else "caught")
        wrong += not is_right
        caught += entry["outcome"] == "caught"
        equivalent += bool(mutant.equivalent)
        mark = "" if is_right else "  <-- WRONG"
        print(
            f"{i:3} {entry['outcome']:16} {entry['seconds']:6.1f} s  {key[:110]}  {entry['test']} {entry['reason'][:60]}{mark}", flush=True
        )
    print(f"mutants: {caught} caught, {equivalent} equivalent, {wrong} wrong")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
