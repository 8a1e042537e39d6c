"""Deaths and drains while everything else goes on. A kill comes as the kernel's would: nobody is told before, on no step board either."""

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from relay.chaos.attack.target import Attack, Broken, Target
from relay.chaos.server import ServerUnderTest

_UP_WITHIN_S = 120.0
_AFTERWARDS_S = 1.0  # what waited has to be caught up with


@dataclass
class _Window:
    deadly: bool
    began_s: float
    ended_s: float = float("inf")


class Strikes:
    """Ends workers and remembers when: an honest client's answer may be broken off within a deadly strike only, its first token come late
    within any."""

    def __init__(self, server: ServerUnderTest) -> None:
        self._server = server
        self._lock = threading.Lock()
        self._windows: list[_Window] = []
        self.n_kills = self.n_drains = 0

    def hit(self, from_s: float, to_s: float, *, deadly: bool) -> bool:
        """Whether a strike fell into this time, or lasted into it."""
        with self._lock:
            return any(each.began_s <= to_s and from_s <= each.ended_s for each in self._windows if each.deadly or not deadly)

    @contextmanager
    def striking(self, *, deadly: bool) -> Iterator[None]:
        """From now on until all workers are up again, and a little longer."""
        window = _Window(deadly, time.monotonic())
        with self._lock:
            self._windows.append(window)
        try:
            yield
            self._wait_until_up()
            time.sleep(_AFTERWARDS_S)
        finally:
            window.ended_s = time.monotonic()

    def around(self, attack: Attack) -> Attack:
        """An attack of which workers die, and may."""

        def struck(target: Target, draw: random.Random) -> None:
            with self.striking(deadly=True):
                attack(target, draw)

        return struck

    def kill(self, target: Target, draw: random.Random) -> None:
        """SIGKILL for any worker, a gateway, the router or a spare."""
        with self.striking(deadly=True):
            pids = self._server.pids()
            del pids["root"]
            with suppress(ProcessLookupError):
                os.kill(pids[draw.choice(sorted(pids))], signal.SIGKILL)
            self.n_kills += 1

    def drain(self, target: Target, draw: random.Random) -> None:
        """Any worker, gateways too: nothing is broken off for it."""
        with self.striking(deadly=False):
            name = draw.choice(sorted(self._server.workers()))
            code, body = target.post(f"/admin/workers/{name}/drain", {})
            if code not in (202, 404, 503):
                raise Broken(f"a drain of {name} is answered with {code} {body}")
            self.n_drains += code == 202

    def _wait_until_up(self) -> None:
        give_up = time.monotonic() + _UP_WITHIN_S
        while not self._server.all_up():
            if time.monotonic() > give_up:
                raise Broken(f"{_UP_WITHIN_S:g} s after a strike not every worker is up")
            time.sleep(0.05)
