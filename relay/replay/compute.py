"""In the place of the compute thread: a task whose steps take virtual time. Counts what was computed, and for how long."""

from collections.abc import Callable

import trio

from relay.engine.engine import Engine
from relay.engine.report import StepReport
from relay.replay.machine import TimedRunner
from relay.simulation.jobs import Jobs


class TimedCompute(Jobs):
    """`relay.engine.host.Compute`. busy_s: virtual seconds in steps; n_prompt_tokens: computed of prompts."""

    def __init__(self, engine: Engine, runner: TimedRunner) -> None:
        super().__init__()
        self._engine, self._runner = engine, runner
        self.n_prompt_tokens = self.n_preempted = 0
        self.busy_s = 0.0

    async def run(self, on_results: Callable[[list[StepReport]], None]) -> None:
        busy = False
        while True:
            if not busy:
                await self._come()
            step = self._engine.begin(self._take())
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
