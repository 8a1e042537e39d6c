"""One worker process as the supervisor holds it: its pid, a pidfd to wait on, and the control channel.

Started by subprocess.Popen on the main thread, not by trio.lowlevel.open_process: that one calls Popen in a pool thread which trio lets go
after ten idle seconds, and PR_SET_PDEATHSIG fires when the *thread* that forked exits, so every worker would be killed ten seconds later.
"""

import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

import trio

from relay.runtime.control import ControlChannel

_PR_SET_PDEATHSIG = 1


class Child:
    """`command` is given two more arguments: the number of its control descriptor, and our pid. Raises OSError if it cannot be started."""

    is_spare = False  # it waited for its life, and has imported everything

    def __init__(self, command: Sequence[str]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            fd = theirs.fileno()
            try:
                # its own process group: a terminal's Ctrl-C reaches the root only, which then drains
                self._popen = subprocess.Popen(
                    [*command, str(fd), str(os.getpid())], pass_fds=(fd,), stdin=subprocess.DEVNULL, process_group=0
                )
            except OSError:
                ours.close()
                raise
        self._pidfd = os.pidfd_open(self._popen.pid)
        self.control = ControlChannel(ours)
        self.pid = self._popen.pid

    def is_alive(self) -> bool:
        return self._popen.poll() is None

    def close(self) -> None:
        """Of a process that is dead and reaped."""
        os.close(self._pidfd)
        self.control.close()

    def kill(self) -> None:
        """SIGKILL to its whole group; ends a stopped process too. Of no effect once it is reaped."""
        if self._popen.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    async def died(self) -> None:
        """Return once the process (all its threads) has exited. Each waiter has its own descriptor: trio lets one task wait on one."""
        fd = os.dup(self._pidfd)
        try:
            await trio.lowlevel.wait_readable(fd)
        finally:
            os.close(fd)

    def scheduled_ns(self) -> tuple[int, int]:
        """How long its threads have run, and have been runnable and waiting for a core, all told; zeros if that cannot be read."""
        return scheduled_ns(self.pid)

    def is_stopped(self) -> bool:
        """By a signal or a debugger, so that it does nothing."""
        try:
            with open(f"/proc/{self.pid}/stat", "rb") as file:
                return file.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
        except (OSError, IndexError):
            return False

    async def fence(self) -> str:
        """Kill if need be, reap, and say how it ended. Afterwards it writes no memory and has none."""
        with trio.CancelScope(shield=True):
            self.kill()
            await self.died()
            code = self._popen.wait()
            self.close()
        return signal.Signals(-code).name if code < 0 else f"exit {code}"


def scheduled_ns(pid: int) -> tuple[int, int]:
    """See `Child.scheduled_ns`."""
    ran = waited = 0
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/schedstat", "rb") as file:
                on_core, runnable = file.read().split()[:2]
            ran += int(on_core)
            waited += int(runnable)
    except (OSError, ValueError):
        return 0, 0
    return ran, waited


def signal_at_parents_death(number: signal.Signals) -> None:
    """Of this process, once the thread that started it ends."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def die_with(parent: int) -> None:
    """In the worker: have the kernel kill us when the root ends. The check closes the race with a death before this call."""
    signal_at_parents_death(signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the root that started this worker is gone")
