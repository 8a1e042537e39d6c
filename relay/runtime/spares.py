"""Worker processes that have imported everything and wait for a life, so that a restart neither starts a process nor imports anything.

In: `take` when a life begins, `refill` when every worker is up. A spare is started only once nothing has died for a moment: importing
costs a core for the better part of a second, and those who recover need it more. One that dies while it waits is reaped and replaced; one
that cannot be started, or dies again and again, is tried again later. That one still lives says nothing of whether it turns: whoever is
given one must hear from it soon (`Incarnation`).
"""

from collections.abc import Callable, Sequence

import structlog
import trio

from relay.runtime.child import Child

_CALM_S = 2.0
_LONGEST_WAIT_S = 60.0
_log = structlog.get_logger()


class Spares:
    """Keeps `count` of them while `run` runs. A spare knows that it is one by finding no `Start` when it comes up. `on_started` is told of
    each one's pid. `child` starts a process in the place of `command`: the simulation's."""

    def __init__(
        self,
        command: Sequence[str],
        count: int,
        all_up: Callable[[], bool],
        on_started: Callable[[int], None],
        child: Callable[[], Child] | None = None,
    ) -> None:
        self._count, self._all_up, self._on_started = count, all_up, on_started
        self._child: Callable[[], Child] = child if child is not None else lambda: Child(tuple(command))
        self._waiting: dict[Child, trio.CancelScope] = {}  # and the scope in which its death is watched for
        self._wanted = trio.Event()
        self._n_failed = 0  # in a row

    def take(self) -> Child:
        """A process for a life: a spare, or a new one. Raises OSError if it cannot be started."""
        for child in list(self._waiting):
            if child.is_alive():
                self._waiting.pop(child).cancel()
                self._n_failed, child.is_spare = 0, True
                return child
        return self._child()

    def refill(self) -> None:
        """All are up: a good moment, if it stays like this."""
        if len(self._waiting) < self._count:
            self._wanted.set()

    def pids(self) -> tuple[int, ...]:
        return tuple(child.pid for child in self._waiting)

    async def run(self) -> None:
        """Until cancelled; then none is left."""
        try:
            async with trio.open_nursery() as nursery:
                while True:
                    await self._wanted.wait()
                    self._wanted = trio.Event()
                    await trio.sleep(min(_CALM_S * 2.0 ** min(self._n_failed, 30), max(_CALM_S, _LONGEST_WAIT_S)))
                    while self._all_up() and len(self._waiting) < self._count:
                        if not self._start(nursery):
                            break
        finally:
            for child in self._waiting:
                await child.fence()
            self._waiting.clear()

    def _start(self, nursery: trio.Nursery) -> bool:
        try:
            child = self._child()
        except OSError as error:  # no process, memory or descriptor left, for now: the workers that are up need none
            self._failed("cannot be started", str(error))
            return False
        self._waiting[child] = trio.CancelScope()
        nursery.start_soon(self._watch, child, self._waiting[child])
        self._on_started(child.pid)
        return True

    async def _watch(self, child: Child, scope: trio.CancelScope) -> None:
        """Until somebody takes it."""
        with scope:
            await child.died()
        if child in self._waiting:
            del self._waiting[child]
            self._failed("died while it waited", await child.fence())

    def _failed(self, what: str, why: str) -> None:
        self._n_failed += 1
        _log.warning("spare_failed", what=what, why=why)
        self.refill()
