"""A thread that takes turns with the loop: only one of the two runs at any time, so that a run with threads is decided by its seed.

The thread runs from one `wait_for` to the next while the loop stands still, and the loop runs until what was waited for is there.
"""

import threading
from collections.abc import Awaitable, Callable

_TURN_ENDS_WITHIN_S = 60.0


class Killed(BaseException):
    """The thread's process is dead: it never comes to its next line. Not an Exception, as nobody in a dead process can catch anything."""


class Strand:
    """`main` on a thread of its own."""

    def __init__(self, main: Callable[[], None]) -> None:
        self._main = main
        self._threads_turn, self._loops_turn = threading.Semaphore(0), threading.Semaphore(0)
        self._asked: Callable[[], Awaitable[None]] | None = None
        self._killed = False

    async def run(self) -> None:
        """On the loop, until `main` has returned. Cancelled, it raises Killed in `main`, wherever that stands."""
        thread = threading.Thread(target=self._live, daemon=True)
        thread.start()
        try:
            while (asked := self._turn()) is not None:
                await asked()
        finally:
            self._killed = True
            while thread.is_alive():
                self._threads_turn.release()
                thread.join(_TURN_ENDS_WITHIN_S)

    def wait_for(self, asked: Callable[[], Awaitable[None]]) -> None:
        """On the thread: let the loop run until this has returned there."""
        if self._killed:
            raise Killed
        self._asked = asked
        self._loops_turn.release()
        self._threads_turn.acquire()
        if self._killed:
            raise Killed

    def _turn(self) -> Callable[[], Awaitable[None]] | None:
        """The thread's, up to what it waits for next; None if it has ended."""
        self._asked = None
        self._threads_turn.release()
        if not self._loops_turn.acquire(timeout=_TURN_ENDS_WITHIN_S):
            raise RuntimeError(f"a thread has not given the loop its turn in {_TURN_ENDS_WITHIN_S:g} s")
        return self._asked

    def _live(self) -> None:
        self._threads_turn.acquire()
        try:
            if not self._killed:
                self._main()
        except Killed:
            pass
        finally:
            self._loops_turn.release()
