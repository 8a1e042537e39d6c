"""In the place of the compute thread: a task whose steps take virtual time. Counts what was computed, and for how long."""

from collections.abc import Callable

import trio

from relay.engine.engine import Engine, Job
from relay.engine.report import StepReport
from relay.replay.machine import TimedRunner


class TimedCompute:
    """`relay.engine.host.Compute`. busy_s: virtual seconds in steps; n_prompt_tokens: computed of prompts."""

    def __init__(self, engine: Engine, runner: TimedRunner) -> None:
        self._jobs: list[Job] = []
        self._wake = trio.Event()
        self.steps = 0  # ended
        self._engine, self._runner = engine, runner
        self.n_prompt_tokens = self.n_preempted = 0
        self.busy_s = 0.0

    def submit(self, job: Job) -> None:
        self._jobs.append(job)
        self._wake.set()

    def step_age_s(self) -> float:
        """No step hangs on virtual time."""
        return 0.0

    async def run(self, on_results: Callable[[list[StepReport]], None]) -> None:
        busy = False
        while True:
            if not busy:
                await self._come()
            jobs, self._jobs = self._jobs, []
            step = self._engine.begin(jobs)
            busy = step.batch is not None
            if step.batch is not None:
                length_s = self._runner.step_ms(step.batch) / 1e3
                await trio.sleep(length_s)
                self.busy_s += length_s
                self._engine.end(step, self._runner.step(step.batch))
            self.steps += 1
            self.n_prompt_tokens += step.report.n_prefill_tokens
            self.n_preempted += step.report.n_preempted
            on_results([step.report])
            await trio.lowlevel.checkpoint()

    async def _come(self) -> None:
        while not self._jobs:
            await self._wake.wait()
            self._wake = trio.Event()
