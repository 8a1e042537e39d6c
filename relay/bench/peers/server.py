"""Servers that take part: how one is started, when it is ready, what CPU time it took, and that it ends with us.

Each runs in a session of its own: whatever carries that session is ended, by its id, and counted, whether or not the server forks.
"""

import ctypes
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec

from relay.errors import StartError

_PR_SET_PDEATHSIG: Final = 1
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
_STOP_WITHIN_S: Final = 30.0
_LIBC: Final = ctypes.CDLL(None)

Process = subprocess.Popen[bytes]


class Server(msgspec.Struct, frozen=True, kw_only=True):
    """`key` is short and stable, `name` is for people. `ready` answers 200 once it serves; `environment` is added to ours."""

    key: str
    name: str
    version: str
    command: list[str]
    url: str
    ready: str = "/health"
    environment: dict[str, str] = {}


@contextmanager
def started(command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> Iterator[Process]:
    """A process that runs while the context is open, its output in `log`; SIGTERM, and SIGKILL for what is left of its session later."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **(environment or {})},
            preexec_fn=lambda: _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM),
        )
    try:
        yield process
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_WITHIN_S)
        _end_session(process.pid)
        process.wait()


@contextmanager
def serving(server: Server, log: Path, within_s: float) -> Iterator[Process]:
    """`server`, ready. Raises StartError with the end of what it said."""
    deadline = time.monotonic() + within_s
    with started(server.command, log, server.environment) as process:
        while not _answers(server.url + server.ready):
            ended = process.poll() is not None
            if ended or time.monotonic() > deadline:
                what = "ended before it was ready" if ended else f"is not ready after {within_s:.0f} s"
                raise StartError(f"{server.name} {what}; its log ends:\n{tail(log)}")
            time.sleep(0.2)
        yield process


def session(leader: int) -> dict[int, float]:
    """CPU seconds by process of a session, with those of children that ended; what has ended and was not waited for is left out."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            fields = _stat(int(entry.name))
            if fields and fields[0] != "Z" and int(fields[3]) == leader:
                found[int(entry.name)] = _cpu_s(fields)
    return found


def _end_session(leader: int) -> None:
    """SIGKILL until nothing of it runs; a killed process is still there for a moment, and may have forked before."""
    deadline = time.monotonic() + _STOP_WITHIN_S
    while (left := session(leader)) and time.monotonic() < deadline:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def own_cpu_s() -> float:
    """Of this process and the children it has waited for."""
    return _cpu_s(_stat(os.getpid()))


def tail(log: Path) -> str:
    """Its last lines."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-15:])


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return int(answer.status) == 200
    except (OSError, ValueError):
        return False


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(") ")[2].split()
    except OSError:
        return []


def _cpu_s(fields: Sequence[str]) -> float:
    return sum(map(int, fields[11:15])) / _TICKS_PER_S
