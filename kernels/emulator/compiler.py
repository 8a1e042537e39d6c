"""Compile the programs of one .cu for the emulator: all its variants in one binary, by the machine's C++ compiler.

    binary(source, PROGRAMS, "plain")     -> a shared library, called in this process
    binary(source, PROGRAMS, "address")   -> an executable with the address and undefined-behaviour sanitizers; "thread": races

Kept under a hash of everything that goes in; processes that ask at once compile once.
"""

import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

from relay.errors import KernelsUnavailable
from relay.kernels.cpp_library import locked
from relay.kernels.cuda_compiler import FOLDER, Program, kernels_of

Mode = Literal["plain", "address", "thread"]

HERE: Final = Path(__file__).resolve().parent
_COMMON: Final = ("-std=c++17", "-ffp-contract=off", "-DRELAY_EMULATOR", "-Wno-unknown-pragmas")
FLAGS: Final[dict[Mode, tuple[str, ...]]] = {
    "plain": (*_COMMON, "-O2", "-fPIC", "-shared"),
    "address": (*_COMMON, "-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer"),
    "thread": (*_COMMON, "-O1", "-g1", "-fsanitize=thread"),
}


def entry_name(program: Program, kernel: str) -> str:
    return f"{program.name}:{kernel}"


def binary(source: Path, programs: Sequence[Program], mode: Mode) -> Path:
    """Compiled once for this content. Raises KernelsUnavailable with what the compiler said."""
    unit = _unit(source, programs, mode)
    digest = hashlib.sha256(f"{unit}{FLAGS[mode]}{_compiler()}".encode())
    for path in (source, *sorted(source.parent.glob("*.cuh")), *sorted(HERE.glob("*.h"))):
        digest.update(path.read_bytes())
    place = _cache() / f"{source.stem}-{mode}-{digest.hexdigest()[:24]}"
    with locked(place.with_name(f"{place.name}.lock")):
        if not place.exists():
            _compile(source, unit, mode, place)
    return place


def _compile(source: Path, unit: str, mode: Mode, place: Path) -> None:
    with tempfile.TemporaryDirectory(dir=place.parent) as folder:
        text, made = Path(folder) / "unit.cpp", Path(folder) / "made"
        text.write_text(unit)
        command = [_compiler(), *FLAGS[mode], f"-I{HERE}", f"-I{source.parent}", f"-I{FOLDER}", str(text), "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise KernelsUnavailable(f"{source.name} does not compile for the emulator:\n{done.stderr[:6000]}")
        made.replace(place)


def _unit(source: Path, programs: Sequence[Program], mode: Mode) -> str:
    """Each variant in a namespace of its own; headers outside of them, once."""
    lines = ['#include "program.h"', *(f'#include "{path.name}"' for path in sorted(FOLDER.glob("*.cuh")))]
    entries = []
    for i, program in enumerate(programs):
        lines += [f"#define {name} {value}" for name, value in program.macros]
        lines += [f"namespace variant_{i} {{", f'#include "{source}"', "}"]
        lines += [f"#undef {name}" for name, _ in program.macros]
        for kernel in kernels_of(source):
            call = f"emulator::launch(variant_{i}::{kernel}, n, g, b, s, a, seed)"
            entries.append(f'{{"{entry_name(program, kernel)}", [](LAUNCH_ARGUMENTS) {{ return {call}; }}}},')
    lines += ["#define LAUNCH_ARGUMENTS size_t n, dim3 g, dim3 b, size_t s, void** a, uint64_t seed"]
    lines += ["static const emulator::Entry kernels[] = {", *entries, "};"]
    lines += ["constexpr size_t n_kernels = sizeof kernels / sizeof *kernels;"]
    if mode == "plain":
        lines += [
            'extern "C" const char* emulator_launch(const char* name, const unsigned* shape, size_t s, void** a, size_t n, uint64_t seed)',
            "{ return emulator::launch_by_name(kernels, n_kernels, name, shape, s, a, n, seed); }",
        ]
    else:
        lines.append("int main(int, char** argv) { return emulator::run_file(kernels, n_kernels, argv[1], argv[2]); }")
    return "\n".join(lines) + "\n"


@functools.cache
def _compiler() -> str:
    found = shutil.which("g++")
    if found is None:
        raise KernelsUnavailable("the emulator needs g++ 11 or later; install it")
    return found


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    folder = (Path(base) if base.startswith("/") else Path.home() / ".cache") / "relayserve" / "emulator"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
