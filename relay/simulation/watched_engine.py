"""The engine, with its steps told to whoever watches: where they begin, also behind one that is not reported yet, and where they end."""

from collections.abc import Callable

from relay.engine.engine import Engine, Job
from relay.engine.runner import Pending, StepResult
from relay.engine.step import Step


class WatchedEngine(Engine):
    """on_began, on_ended: called on the compute thread."""

    on_began: Callable[[Step], None]
    on_ended: Callable[[], None]

    def begin(self, jobs: list[Job]) -> Step:
        """See `Engine.begin`."""
        step = super().begin(jobs)
        self.on_began(step)
        return step

    def end(self, step: Step, result: StepResult) -> None:
        """See `Engine.end`."""
        super().end(step, result)
        self.on_ended()

    def _follow(self, step: Step, result: StepResult) -> tuple[Step, Pending] | None:
        flight = super()._follow(step, result)
        if flight is not None:
            self.on_began(flight[0])
        return flight
