"""Build every CUDA kernel for the emulator and for three architectures, and check all of it: python -m tests.kernels.everything [--quick]

cubins      every variant, by NVRTC: nothing spilled, registers and occupancy as wanted, the instructions that were meant
nvcc        every variant for one architecture, through the other front end (not with --quick)
tests       the emulator's and the kernels' own, under sanitizers too; with --quick one pass over each kernel and each mode
table       scripts/measured/kernels.md, written anew (not with --quick)
mutants     bugs planted in copies; scripts/measured/mutants.json keeps what was found for these sources (not with --quick)

Exits non-zero if anything fails; the last line is a summary.
"""

import argparse
import hashlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from relay.kernels.cuda_compiler import ARCHITECTURES, Program, build, build_all
from relay.kernels.cuda_programs import PROGRAMS
from relay.kernels.emulator.compiler import FLAGS, binary
from tests.cubins.table import table
from tests.cubins.toolkit import compile_with_nvcc
from tests.cubins.wanted import faults

ROOT: Final = Path(__file__).parents[2]
MEASURED: Final = ROOT / "scripts" / "measured"
STEMS: Final = tuple(dict.fromkeys(program.stem for program in PROGRAMS))
CORES: Final = 2
# the long ones first, so that both processes end together
FILES: Final = (
    ("quant_matvec", "sample_tokens", "kv_transfer", "rms_norm", "silu_mul"),
    ("paged_prefill", "paged_decode", "exact_matmul", "kv_scatter_rope"),
)
QUICK: Final = "sanitizers or batch or mask or gather or order"


def emulator_builds() -> None:
    """As the tests of each kernel ask for them."""
    jobs = []
    for stem in STEMS:
        programs = tuple(program for program in PROGRAMS if program.stem == stem)
        watched = [program for program in programs if ("ELEMENT", "bf16") in program.macros] or programs
        jobs += [(programs[0].path, programs if mode == "plain" else watched, mode) for mode in FLAGS]
    with ThreadPoolExecutor(CORES) as pool:
        list(pool.map(lambda job: binary(*job), jobs))


def cubin_faults() -> list[str]:
    pairs = [(program, architecture) for program in PROGRAMS for architecture in ARCHITECTURES]
    build_all(pairs)
    with ThreadPoolExecutor(CORES) as pool:
        return [fault for found in pool.map(lambda pair: _known_faults(*pair), pairs) for fault in found]


def _known_faults(program: Program, architecture: int) -> list[str]:
    """A cubin that was sound by these very rules is not looked into again."""
    cubin = build(program, architecture)
    rules = hashlib.sha256(b"".join(path.read_bytes() for path in sorted((ROOT / "tests" / "cubins").glob("*.py"))))
    sound = cubin.with_suffix(f".{rules.hexdigest()[:16]}.sound")
    if sound.exists():
        return []
    found = faults(program, architecture, cubin)
    if not found:
        sound.touch()
    return found


def nvcc_faults() -> list[str]:
    def check(pair: tuple[int, Program]) -> list[str]:
        number, program = pair
        architecture = ARCHITECTURES[number % len(ARCHITECTURES)]
        made = Path(folder) / f"{program.name}.cubin"
        compile_with_nvcc(program, architecture, made)
        return [f"by nvcc: {fault}" for fault in faults(program, architecture, made)]

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(CORES) as pool:
        return [fault for found in pool.map(check, enumerate(PROGRAMS)) for fault in found]


def run_tests(quick: bool) -> tuple[int, list[str]]:
    """How many passed, and what failed."""
    commands = []
    for stems in FILES:
        files = [f"tests/kernels/test_{stem}.py" for stem in stems]
        extra = ["-k", QUICK] if quick else ["tests/kernels/test_cubins.py"] if stems is FILES[0] else ["tests/kernels/emulator"]
        commands.append([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files, *extra])
    with ThreadPoolExecutor(CORES) as pool:
        done = list(pool.map(lambda c: subprocess.run(c, cwd=ROOT, capture_output=True, text=True, check=False), commands))
    passed = sum(int(n) for run in done for n in re.findall(r"(\d+) passed", run.stdout[-300:]))
    failed = [line for run in done for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if not failed:
        failed = [f"pytest ended with {run.returncode}: {(run.stdout + run.stderr)[-2000:]}" for run in done if run.returncode]
    return passed, failed


def run_mutants() -> list[str]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.mutants", "--record", str(MEASURED / "mutants.json")], cwd=ROOT, check=False
    )
    return [f"mutants: {done.returncode}"] if done.returncode else []


def main() -> None:
    parser = argparse.ArgumentParser(description="Build and check every CUDA kernel, without a GPU.")
    parser.add_argument("--quick", action="store_true", help="within 50 seconds once everything is built")
    quick = parser.parse_args().quick
    began = time.monotonic()
    failures: list[str] = []

    def step(name: str, work: Callable[[], Iterable[str] | None]) -> None:
        started = time.monotonic()
        found = list(work() or ())
        failures.extend(found)
        print(f"{name:16} {time.monotonic() - started:6.1f} s  {'ok' if not found else f'{len(found)} FAILED'}", flush=True)
        for fault in found:
            print(f"    {fault}", flush=True)

    passed = 0

    def tests() -> list[str]:
        nonlocal passed
        passed, found = run_tests(quick)
        return found

    step("emulator builds", emulator_builds)
    step("cubins", cubin_faults)
    step("tests", tests)
    if not quick:
        step("nvcc", nvcc_faults)
        MEASURED.mkdir(exist_ok=True)
        (MEASURED / "kernels.md").write_text(table())
        step("mutants", run_mutants)
    verdict = f"{len(failures)} FAILED" if failures else "all sound"
    took = time.monotonic() - began
    print(f"kernels: {len(PROGRAMS)} programs x {len(ARCHITECTURES)} architectures, {passed} tests passed, {verdict}, {took:.0f} s")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
