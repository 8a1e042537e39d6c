"""The compute thread: one per worker, the only one that computes. Jobs go in by a queue, results come out to one trio task.

`step(jobs)` runs on the thread with the jobs that came since the last step, and returns (result, whether there is more to do). While there
is, it is called again and again; else the thread blocks on the queue and uses no CPU. Results lie in a deque and one idempotent callback
wakes the loop, however many there are: at once, or, where a step says when it computes (`tell`), while the next one does, for a loop that
wakes while a step is being made takes the GIL from it and leaves the cores idle. What `step` raises is raised by `run`, in the actor, as
EngineDied. Cancelling `run` ends the thread after its present step; a step that never returns ends only with the process.

Whoever starts a worker that computes also sets sys.setswitchinterval(0.0001): the loop and this thread share a GIL.
"""

import os
import queue
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, Protocol, TypeVar

import trio

from relay.clock import now_ns
from relay.errors import EngineDied

Job = TypeVar("Job")
Result = TypeVar("Result")
_STEP_ENDS_WITHIN_S = 1.0


class Stop:
    """Ends the thread; never a job."""


_STOP = Stop()


class JobQueue(Protocol[Job]):
    """Between any thread, which puts, and the one that computes: `queue.SimpleQueue`, or the simulation's."""

    def put(self, job: Job | Stop, /) -> None: ...
    def get(self) -> Job | Stop: ...
    def empty(self) -> bool: ...


def _nothing() -> None:
    pass


class ComputeThread(Generic[Job, Result]):
    """`on_thread_start` runs first on the thread (affinity, torch threads). `niceness`, its own, lets a woken loop go before it."""

    def __init__(
        self,
        step: Callable[[list[Job]], tuple[Result | None, bool]],
        *,
        name: str = "compute",
        niceness: int = 5,
        on_thread_start: Callable[[], None] = _nothing,
        on_thread_end: Callable[[], None] = _nothing,
        tells: bool = False,
        jobs: JobQueue[Job] | None = None,
    ) -> None:
        """`tells`: a `step` after which there is more to do calls `tell` in the next turn. Without that its result would lie there.

        `on_thread_end` runs last on the thread: it waits for what `step` has begun, so that nobody writes any more once `run` returns.
        """
        self._step, self._name, self._niceness, self._tells = step, name, niceness, tells
        self._on_thread_start, self._on_thread_end = on_thread_start, on_thread_end
        self._jobs: JobQueue[Job] = jobs if jobs is not None else queue.SimpleQueue()
        self._arrived: list[Job | Stop] = []  # taken from the queue, and not yet given to a step
        self._results: deque[Result] = deque()
        self._wake, self._ended = trio.Event(), False
        self._error: Exception | None = None
        self.steps = 0  # ended
        self.step_started = 0  # monotonic nanoseconds of the step that runs; 0 while none does

    def submit(self, job: Job) -> None:
        """From any thread, at any time; taken by the next step."""
        self._jobs.put(job)

    def arrived(self) -> list[Job]:
        """For `step`, while it runs: what the next one will be given, as far as it has come. Never waits."""
        while not self._jobs.empty():
            self._arrived.append(self._jobs.get())
        return [job for job in self._arrived if not isinstance(job, Stop)]

    def tell(self) -> None:
        """By `step`, while something is computed without the GIL: now the loop may have what earlier steps returned."""
        if self._results:
            self._notify()

    def step_age_s(self) -> float:
        """For the heartbeat: a loop that turns says nothing of a thread that does not."""
        started = self.step_started
        return (now_ns() - started) / 1e9 if started else 0.0

    async def run(self, on_results: Callable[[list[Result]], None]) -> None:
        """Start the thread and give results, in order, to `on_results` on the trio loop, until cancelled. Once only. Raises EngineDied."""
        self._token = trio.lowlevel.current_trio_token()
        self._start()
        try:
            while True:
                ended = self._ended  # read before the results: none can follow
                results = [self._results.popleft() for _ in range(len(self._results))]
                if results:
                    on_results(results)
                if ended:
                    break
                await self._woken()
            raise EngineDied(f"{type(self._error).__name__}: {self._error}" if self._error else "the thread ended") from self._error
        finally:
            self._jobs.put(_STOP)
            with trio.CancelScope(shield=True, deadline=trio.current_time() + _STEP_ENDS_WITHIN_S):
                while not self._ended:  # the thread may still write memory that others would be given
                    await self._woken()

    def _start(self) -> None:
        threading.Thread(target=self._main, name=self._name, daemon=True).start()  # daemon: a hung step must not hold up the exit

    async def _woken(self) -> None:
        await self._wake.wait()
        self._wake = trio.Event()

    def _main(self) -> None:
        try:
            if self._niceness:
                me = threading.get_native_id()
                os.setpriority(os.PRIO_PROCESS, me, min(os.getpriority(os.PRIO_PROCESS, me) + self._niceness, 19))
            self._on_thread_start()
            try:
                self._loop()
            finally:
                self._on_thread_end()
        except Exception as error:  # this thread's edge: `run` raises it in the actor
            self._error = error
        finally:
            self.step_started = 0
            self._ended = True
            self._notify()

    def _loop(self) -> None:
        busy = False
        while True:
            if not busy and not self._arrived:
                self._arrived.append(self._jobs.get())
            jobs = self.arrived()
            if len(jobs) < len(self._arrived):
                return
            self._arrived = []
            self.step_started = now_ns()
            result, busy = self._step(jobs)
            self.step_started = 0
            self.steps += 1
            if result is not None:
                self._results.append(result)
            if not (busy and self._tells):
                self.tell()

    def _notify(self) -> None:
        with suppress(trio.RunFinishedError):
            self._token.run_sync_soon(self._set, idempotent=True)  # what this raised would be a TrioInternalError: it must not

    def _set(self) -> None:
        self._wake.set()
