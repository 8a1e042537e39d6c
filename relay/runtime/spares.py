"""Worker processes that have imported everything and wait for a life, so that a restart neither starts a process nor imports anything.

In: `take` when a life begins, `refill` when every worker is up. A spare is started only once nothing has died for a moment: importing
costs a core for the better part of a second, and those who recover need it more.
"""

from collections.abc import Callable, Sequence

import trio

from relay.runtime.child import Child

_CALM_S = 2.0


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
        self._waiting: list[Child] = []
        self._wanted = trio.Event()

    def take(self) -> Child:
        """A process for a life: a spare, or a new one. Raises OSError if it cannot be started."""
        while self._waiting:
            child = self._waiting.pop(0)
            if child.is_alive():
                return child
            child.close()
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
            while True:
                await self._wanted.wait()
                self._wanted = trio.Event()
                await trio.sleep(_CALM_S)
                while self._all_up() and len(self._waiting) < self._count:
                    self._waiting.append(self._child())
                    self._on_started(self._waiting[-1].pid)
        finally:
            for child in self._waiting:
                await child.fence()
            self._waiting.clear()
