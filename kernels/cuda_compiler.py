"""The .cu files of this room into cubins, without a GPU, and the place where cubins are kept.

    Program("paged_decode", (("ELEMENT", "bf16"), ("HEAD_DIM", "128"), ("STAGES", "3")))     one .cu and its macros
    compile_cubin(program, 90) -> (cubin, what ptxas says)       needs nvidia-cuda-nvrtc; no headers, no device
    build(program, 90) -> Path                                   the same, once: kept under a hash of sources, macros and flags
    build_all([(program, 90), ...]) -> [Path, ...]               several at a time

A cubin runs on its architecture and on later ones of the same generation: sm_80 serves 8.x, sm_90 9.x, sm_100 10.x. No CuPy, no torch.
"""

import hashlib
import os
import re
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from relay.kernels import nvrtc
from relay.kernels.cpp_library import locked

FOLDER: Final = Path(__file__).resolve().parent
ARCHITECTURES: Final = (80, 90, 100)
_KERNEL: Final = re.compile(r"^KERNEL void (?:__launch_bounds__\([^)]*\)\s*)?(\w+)\(", re.MULTILINE)
FLAGS: Final = ("-std=c++17", "-default-device", "-ftz=true", "--fmad=false")


@dataclass(frozen=True, slots=True)
class Program:
    """A .cu file and the macros that it is compiled with."""

    stem: str
    macros: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        return "_".join((self.stem, *(value for _, value in self.macros)))

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.stem}.cu"

    @property
    def flags(self) -> tuple[str, ...]:
        return (*FLAGS, *(f"-D{name}={value}" for name, value in self.macros), f"-I{FOLDER}")


def kernels_of(source: Path) -> list[str]:
    """Their names, in the order of the file."""
    return _KERNEL.findall(source.read_text())


def architecture_for(major: int, minor: int) -> int | None:
    """The one of ARCHITECTURES whose cubins a device of this compute capability runs."""
    return next((a for a in ARCHITECTURES if a // 10 == major and a % 10 <= minor), None)


def cubin_path(program: Program, architecture: int) -> Path:
    """Where the cubin lies once it is built. It need not be there."""
    digest = hashlib.sha256(repr((program.stem, program.macros, FLAGS, architecture)).encode())
    for path in (program.path, *sorted(FOLDER.glob("*.cuh"))):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return cache_folder() / f"{program.name}-sm_{architecture}-{digest.hexdigest()[:24]}.cubin"


def build(program: Program, architecture: int) -> Path:
    """Compile unless it is there; beside it lies what the compiler said (`.log`). Raises KernelsUnavailable."""
    place = cubin_path(program, architecture)
    if not place.exists():
        with locked(place.with_suffix(".lock")):  # workers that start together compile once
            if not place.exists():
                cubin, log = compile_cubin(program, architecture)
                _write(place.with_suffix(".log"), log.encode())
                _write(place, cubin)
    return place


def build_all(pairs: Iterable[tuple[Program, int]]) -> list[Path]:
    """Cubins of (program, architecture), in that order. Raises KernelsUnavailable."""
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:  # the compiler works outside of the interpreter's lock
        return list(pool.map(lambda pair: build(*pair), pairs))


def compile_cubin(program: Program, architecture: int) -> tuple[bytes, str]:
    """Raises KernelsUnavailable, with what the compiler said."""
    flags = (f"--gpu-architecture=sm_{architecture}", "--ptxas-options=-v", *program.flags)
    return nvrtc.compile_source(program.path.read_bytes(), program.path.name, flags)


def cache_folder() -> Path:
    """Made if need be."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    folder = (Path(base) if base.startswith("/") else Path.home() / ".cache") / "relayserve" / "cubins"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _write(place: Path, content: bytes) -> None:
    """Whole or not at all."""
    with tempfile.NamedTemporaryFile(dir=place.parent, delete=False) as file:
        file.write(content)
    Path(file.name).replace(place)
