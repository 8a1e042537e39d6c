"""The engine and its thread, as the actors of a worker see them: jobs in, reports out on the trio loop."""

import itertools
from collections.abc import Callable
from typing import Protocol

from relay.engine.engine import Drop, Engine, Job, Nudge
from relay.engine.report import StepReport
from relay.engine.sequence import SequenceId
from relay.runtime.compute import ComputeThread


class Compute(Protocol):
    """What turns the engine's steps: the compute thread, or a simulation of it."""

    steps: int

    def submit(self, job: Job) -> None: ...
    def step_age_s(self) -> float: ...
    async def run(self, on_results: Callable[[list[StepReport]], None]) -> None: ...


class EngineHost:
    """One per worker; both actors of an aggregated worker subscribe, and each takes what is its own from every report."""

    def __init__(
        self,
        engine: Engine,
        *,
        max_running: int,
        exact: bool = True,
        on_thread_start: Callable[[], None] = lambda: None,
        compute: Compute | None = None,
    ) -> None:
        """`exact`: see `relay.messages.Tokens`. `compute`: None is a compute thread, which runs `on_thread_start` first."""
        self.max_running, self.exact = max_running, exact
        self._engine = engine
        self._ids = itertools.count(1)
        self._subscribers: list[Callable[[StepReport], None]] = []
        self._thread: Compute
        if compute is None:
            self._thread = thread = ComputeThread(engine.step, on_thread_start=on_thread_start, on_thread_end=engine.settle, tells=True)
            engine.arrived, engine.computes, engine.flies = thread.arrived, thread.tell, True
        else:
            self._thread = compute

    def subscribe(self, on_report: Callable[[StepReport], None]) -> None:
        """`on_report` is called on the trio loop with every report, in order; it must not wait."""
        self._subscribers.append(on_report)

    def next_id(self) -> SequenceId:
        return next(self._ids)

    def nudge(self) -> None:
        """Blocks were freed outside the engine, which may be waiting for some. To be called after they are."""
        if self._engine.n_waiting:
            self._thread.submit(Nudge())

    def submit(self, job: Job) -> None:
        """Taken at the next step; wakes an idle engine. A step that is computed only for what is dropped ends early."""
        self._thread.submit(job)
        if isinstance(job, Drop):
            self._engine.forgo(job.id)

    @property
    def n_running(self) -> int:
        return self._engine.n_running

    @property
    def n_waiting(self) -> int:
        return self._engine.n_waiting

    def progress(self) -> tuple[int, float]:
        """Steps so far, and the age in seconds of the one that runs (0 between steps)."""
        return self._thread.steps, self._thread.step_age_s()

    async def run(self) -> None:
        """Until cancelled. Raises EngineDied: the worker ends with it."""
        await self._thread.run(self._on_reports)

    def _on_reports(self, reports: list[StepReport]) -> None:
        for report in reports:
            for on_report in self._subscribers:
                on_report(report)
