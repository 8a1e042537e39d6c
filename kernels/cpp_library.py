"""The C++ of this room as one shared library, compiled once for the machine that runs it, and cached.

    library() -> ctypes.CDLL        calls release the GIL; the modules beside each .cpp declare what they call

The library is named by a hash of all sources, the compiler's version and the flags, and kept under `$XDG_CACHE_HOME/relayserve/kernels`.
It appears there whole or not at all (written elsewhere, then renamed), and under a lock, so that workers that start together compile once.
Files are compiled side by side. Which instructions may be used follows from the processor alone: AVX-512 with VNNI, or AVX2. Both give the
same bits (`simd.h`), so floating-point contraction is off.
"""

import concurrent.futures
import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Literal

from relay.errors import KernelsUnavailable

Instructions = Literal["avx512", "avx2"]

FOLDER: Final = Path(__file__).resolve().parent
SOURCES: Final = (
    "decoder_step.cpp",
    "packed_matmul.cpp",
    "paged_attention.cpp",
    "token_sampling.cpp",
    "weight_packing.cpp",
    "thread_pool.cpp",
    "block_push.cpp",
    "block_checksum.cpp",
    "machine_peaks.cpp",
)
FLAGS: Final = ("-std=c++17", "-O3", "-ffp-contract=off", "-fPIC", "-fvisibility=hidden", "-pthread")
_AVX2: Final = ("-mavx2", "-mfma", "-mf16c", "-mbmi", "-mbmi2", "-mpopcnt")
INSTRUCTION_FLAGS: Final[dict[Instructions, tuple[str, ...]]] = {
    "avx512": (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni", "-DRELAY_AVX512"),
    "avx2": _AVX2,
}
_NEEDED: Final[dict[Instructions, frozenset[str]]] = {
    "avx512": frozenset(("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni")),
    "avx2": frozenset(("avx2", "fma", "f16c", "bmi1", "bmi2", "popcnt")),
}
_COMPILERS: Final = ("g++", "clang++", "c++")
_COMPILE_LIMIT_S: Final = 300.0


_once = threading.Lock()  # threads that pack weights come here together, and `functools.cache` would let all of them compile


def library() -> ctypes.CDLL:
    """Compile if need be, and load. Raises KernelsUnavailable."""
    with _once:
        return _library()


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(str(library_path()))


def library_path() -> Path:
    """Where the library for this machine lies, compiled if need be. Raises KernelsUnavailable."""
    instructions, compiler = best_instructions(), find_compiler()
    flags = (*FLAGS, *INSTRUCTION_FLAGS[instructions])
    place = _cache_folder() / f"{_fingerprint(compiler, flags)}.so"
    if not place.exists():
        with locked(place.with_suffix(".lock")):
            if not place.exists():
                compile_library(place, [FOLDER / name for name in SOURCES], flags, compiler)
    return place


def best_instructions() -> Instructions:
    """What this processor has. Raises KernelsUnavailable if that is not enough."""
    found = processor_flags()
    for name in INSTRUCTION_FLAGS:
        if _NEEDED["avx2"] <= found and _NEEDED[name] <= found:
            return name
    missing = ", ".join(sorted(_NEEDED["avx2"] - found)) or platform.machine()
    raise KernelsUnavailable(f"the native kernels need an x86-64 processor with AVX2; this one lacks {missing}")


def processor_flags() -> frozenset[str]:
    """As Linux names them; none where it does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2] for line in lines if line.startswith("flags")), "").split())


def find_compiler() -> str:
    """The path of a C++ compiler. Raises KernelsUnavailable."""
    found = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if found is None:
        raise KernelsUnavailable(f"the native kernels need a C++ compiler, and none of {', '.join(_COMPILERS)} is there; install g++")
    return found


def compile_library(place: Path, sources: Sequence[Path], flags: Sequence[str], compiler: str) -> None:
    """Write a shared library to `place`. Raises KernelsUnavailable with what the compiler said."""
    with tempfile.TemporaryDirectory(dir=place.parent, prefix=".building-") as folder:
        objects = [Path(folder) / f"{source.stem}.o" for source in sources]
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as several:
            jobs = [
                several.submit(_run, (compiler, *flags, "-c", str(source), "-o", str(to)))
                for source, to in zip(sources, objects, strict=True)
            ]
            for job in jobs:
                job.result()
        whole = Path(folder) / place.name
        _run((compiler, *flags, "-shared", "-Wl,-Bsymbolic", *map(str, objects), "-o", str(whole)))
        whole.replace(place)


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelsUnavailable(f"the native kernels were not compiled: {error}") from error
    if done.returncode != 0:
        said = "\n".join(done.stderr.strip().splitlines()[:20])
        raise KernelsUnavailable(f"the native kernels were not compiled: `{' '.join(command)}` said:\n{said}")


def _fingerprint(compiler: str, flags: Sequence[str]) -> str:
    try:
        version = subprocess.run((compiler, "--version"), capture_output=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise KernelsUnavailable(f"the compiler {compiler} does not run: {error}") from error
    digest = hashlib.sha256(repr((compiler, flags, SOURCES)).encode() + version)
    for path in sorted([*FOLDER.glob("*.h"), *(FOLDER / name for name in SOURCES)]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:32]


def _cache_folder() -> Path:
    """Made if need be; one of this process's own where the user's cannot be written."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        folder = (Path(base) if base.startswith("/") else Path.home() / ".cache") / "relayserve" / "kernels"
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):
        pass
    return Path(_own_folder().name)


@functools.cache
def _own_folder() -> "tempfile.TemporaryDirectory[str]":
    """Removed when the process ends."""
    return tempfile.TemporaryDirectory(prefix="relayserve-kernels-")


@contextmanager
def locked(place: Path) -> Iterator[None]:
    """One holder of this file at a time, on this machine."""
    with place.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
