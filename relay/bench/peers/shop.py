"""Where peers come from: commands that fetch and build them, run at low priority with their output in a file, and a cache of what came out.

A tool lies in its folder whole or not at all: it is made elsewhere and renamed, under a lock, so that two runs at once build once.
"""

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from relay.errors import StartError
from relay.model.source import default_cache_dir

_TAIL_LINES: Final = 12


def shelf(name: str) -> Path:
    """Where the tool of that name lies, or would lie, for this machine's processor. Raises StartError."""
    return default_cache_dir() / "peers" / f"{name}-{_processor()}"


def stock(folder: Path, make: Callable[[Path], None], say: Callable[[str], None]) -> Path:
    """`folder`, made by `make` in a place of its own if it is not there yet. Raises StartError."""
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_name(folder.name + ".lock"), say):
        if not folder.is_dir():
            part = folder.with_name(folder.name + ".making")
            shutil.rmtree(part, ignore_errors=True)  # of a dead one: we hold the lock
            part.mkdir()
            make(part)
            part.rename(folder)
    return folder


def run(command: Sequence[str | Path], log: Path, what: str, *, timeout_s: float = 7200.0, **environment: str) -> None:
    """Run to the end, at low priority. Raises StartError with the last lines it said; all of them are in `log`."""
    with log.open("ab") as file:
        file.write(f"$ {' '.join(map(str, command))}\n".encode())
        file.flush()
        try:
            done = subprocess.run(
                ["nice", "-n", "15", *map(str, command)],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                timeout=timeout_s,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise StartError(f"{what}: {error}; what was said is in {log}") from error
    if done.returncode:
        said = "\n".join(log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])
        raise StartError(f"{what}: exit status {done.returncode}; all that was said is in {log}, its end is:\n{said}")


def new_venv(folder: Path, log: Path) -> Path:
    """The Python of a virtual environment made there."""
    run([sys.executable, "-m", "venv", folder], log, "a virtual environment cannot be made")
    return folder / "bin" / "python"


@contextmanager
def _locked(path: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock; it ends with the process, whatever ends that."""
    with path.open("wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another run is making {path.stem}; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _processor() -> str:
    """A native build is for the processor it was made on."""
    kept = [line for line in _cpuinfo().splitlines() if line.startswith(("model name", "flags"))][:2]
    return hashlib.sha256("\n".join([platform.machine(), *kept]).encode()).hexdigest()[:12]


def _cpuinfo() -> str:
    try:
        return Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return ""
