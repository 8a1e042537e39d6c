"""Jobs for an engine that a task turns on virtual time, in the place of the compute thread and its queue."""

import trio

from relay.engine.engine import Job


class Jobs:
    """`relay.engine.host.Compute`, but for `run`."""

    def __init__(self) -> None:
        self._jobs: list[Job] = []
        self._wake = trio.Event()
        self.steps = 0  # ended

    def submit(self, job: Job) -> None:
        self._jobs.append(job)
        self._wake.set()

    def step_age_s(self) -> float:
        """No step hangs on virtual time."""
        return 0.0

    async def _come(self) -> None:
        while not self._jobs:
            await self._wake.wait()
            self._wake = trio.Event()

    def _take(self) -> list[Job]:
        jobs, self._jobs = self._jobs, []
        return jobs
