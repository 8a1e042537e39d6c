"""Peers are built and installed once, into the cache folder of this processor; a build that was cut short goes on where it stopped."""

import fcntl
import hashlib
import os
import platform
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from relay.errors import StartError
from relay.model.source import default_cache_dir

Say = Callable[[str], None]


def kept(name: str, make: Callable[[Path], None], say: Say) -> Path:
    """The folder of that name, filled by `make` unless it has been. Two runs at once fill it once. Raises StartError."""
    folder = default_cache_dir() / "peers" / f"{name}-{_processor()}"
    folder.mkdir(parents=True, exist_ok=True)
    done = folder / "done"
    if not done.exists():
        with (folder / "lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                say(f"making {name} in {folder}: some minutes, once")
                make(folder)
                done.touch()
    return folder


def run(command: Sequence[str | Path], log: Path, what: str, **environment: str) -> None:
    """To its end, at low priority. Raises StartError with the last that it said."""
    with log.open("ab") as file:
        done = subprocess.run(
            ["nice", *command],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            check=False,
        )
    if done.returncode:
        said = "\n".join(log.read_text(errors="replace").splitlines()[-12:])
        raise StartError(f"{what}: exit status {done.returncode}; its log ends:\n{said}")


def _processor() -> str:
    """What is compiled natively is for the processor that it was compiled on."""
    lines = [line for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines() if line.startswith(("model name", "flags"))]
    return hashlib.sha256("\n".join([platform.machine(), *lines[:2]]).encode()).hexdigest()[:12]
