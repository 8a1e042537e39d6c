"""Processes that are ours to end: started in a session of their own, ended by their own ids, and what CPU time they took.

A server may fork as it likes: whatever carries its session is its own. All are ended when the context is left, whatever ends it; if this
process is killed outright the kernel tells the server's first process to stop.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from relay.bench.peers.contestant import Contestant
from relay.errors import StartError

_PR_SET_PDEATHSIG: Final = 1
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
_STOP_WITHIN_S: Final = 30.0
_LIBC: Final = ctypes.CDLL(None, use_errno=True)
SPIN: Final = (sys.executable, "-c", "while True: pass")


class Started:
    """A process that runs while the context is open; its output goes to `log`."""

    def __init__(self, command: list[str], log: Path, environment: dict[str, str] | None = None) -> None:
        self._command, self.log_path, self._environment = command, log, environment or {}
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Started":
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **self._environment},
                preexec_fn=_die_with_parent,
            )
        return self

    def __exit__(self, *_: object) -> None:
        """SIGTERM to the first process; what is left of its session after a while is killed, one by one."""
        process = self._process
        if process is None:
            return
        try:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.wait(_STOP_WITHIN_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            for member in [*members(process.pid)]:
                _kill(member.pid)
            process.wait()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def lives(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")


class Member(msgspec.Struct, frozen=True):
    """One process of a session and the CPU time it has taken, with that of its children that have ended."""

    pid: int
    cpu_s: float


def members(session: int) -> Iterator[Member]:
    """Of a session, those that have ended and were not waited for left out."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            fields = _stat(int(entry.name))
            if fields and fields[0] != "Z" and int(fields[3]) == session:
                yield Member(int(entry.name), _cpu_s(fields))


def cpu_s(pid: int) -> float:
    """Of one process and its children that have ended; 0 when it is gone."""
    return _cpu_s(_stat(pid))


def wait_until_ready(contestant: Contestant, started: Started, within_s: float) -> float:
    """Seconds until its ready path answered 200. Raises StartError with the end of its log."""
    began = time.monotonic()
    while time.monotonic() - began < within_s:
        if not started.lives():
            raise StartError(f"{contestant.name} ended before it was ready; its log ends:\n{_tail(started)}")
        try:
            with urllib.request.urlopen(contestant.url + contestant.ready, timeout=5) as answer:
                if answer.status == 200:
                    return time.monotonic() - began
        except (urllib.error.URLError, OSError, ValueError):
            pass
        time.sleep(0.2)
    raise StartError(f"{contestant.name} is not ready after {within_s:.0f} s; its log ends:\n{_tail(started)}")


def _tail(started: Started) -> str:
    return "\n".join(started.log().splitlines()[-15:])


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(") ")[2].split()
    except OSError:
        return []


def _cpu_s(fields: list[str]) -> float:
    return sum(map(int, fields[11:15])) / _TICKS_PER_S


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):  # it has just ended
        os.kill(pid, signal.SIGKILL)


def _die_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
