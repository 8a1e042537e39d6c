"""The compute thread of a simulated worker: the real one, as a strand, and the engine's real turns with a step in flight.

The loop runs whenever the thread waits, for jobs or for a step, and for a drawn while wherever the engine looks whether jobs have come. A
hung worker stands still at such places; a killed one never comes to the next. What the thread has told reaches the actors a drawn while
later, when the next step may have begun.
"""

from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import trio

from relay.engine.engine import Job
from relay.engine.report import StepReport
from relay.engine.step import Step
from relay.runtime.compute import ComputeThread, Stop
from relay.simulation.machine import Machine
from relay.simulation.strand import Strand
from relay.simulation.watched_engine import WatchedEngine

if TYPE_CHECKING:
    from relay.simulation.life import Life


class SimulatedCompute(ComputeThread[Job, StepReport]):
    """`relay.engine.host.Compute`. step: that the engine has begun last."""

    def __init__(self, life: "Life", engine: WatchedEngine, machine: Machine) -> None:
        self._life, self._engine, self._machine = life, engine, machine
        self._queue = _Queue(life, self)
        super().__init__(engine.step, jobs=self._queue, niceness=0, on_thread_end=engine.settle, tells=True)
        engine.arrived, engine.computes, engine.flies = self.arrived, self.tell, True
        engine.on_began, engine.on_ended = self._began, self._step_ended
        self._draw = life.world.draw_of("compute")
        self._strand = Strand(self._main)
        self._begun: list[Callable[[], Awaitable[None]]] = []
        self._told = False
        self.step: Step | None = None

    @property
    def is_idle(self) -> bool:
        engine = self._engine
        return not (self._queue.waiting or self._arrived or self._results or engine.n_running or engine.n_waiting or engine._flight)

    def corrupt(self) -> None:
        """The next piece of a push."""
        self._machine.corrupts = True

    async def run(self, on_results: Callable[[list[StepReport]], None]) -> None:
        """See `ComputeThread.run`."""

        def tell(reports: list[StepReport]) -> None:
            on_results(reports)
            self._life.world.watch.reported(self._life)

        async with trio.open_nursery() as self._nursery:
            await super().run(tell)

    def wait_for(self, asked: Callable[[], Awaitable[None]]) -> None:
        """On the thread: let the loop run until this has returned, and the worker runs."""

        async def goes_on() -> None:
            self._pass_on()
            await asked()
            await self._life.runs()

        self._strand.wait_for(goes_on)

    def spawn(self, task: Callable[[], Awaitable[None]]) -> None:
        """On the thread: begin this on the loop, as soon as that has its turn."""
        self._begun.append(task)

    def _start(self) -> None:
        self._nursery.start_soon(self._drive)

    async def _drive(self) -> None:
        try:
            await self._strand.run()
        finally:
            self._set()

    def _notify(self) -> None:
        self._told = True

    def _pass_on(self) -> None:
        """What the thread has begun and told since the loop's last turn."""
        begun, self._begun = self._begun, []
        for task in begun:
            self._nursery.start_soon(task)
        if self._told:
            self._told = False
            longest = self._life.world.scenario.pace.report_s
            delay_s = self._draw.choice((0.0, longest)) * self._draw.random() if longest else 0.0
            self._life.world.agenda.after(delay_s, lambda: self._life.when_running(self._set))

    def _began(self, step: Step) -> None:
        self.step = step

        async def watched() -> None:
            self._life.world.watch.began(self._life, step)
            self._life.reached("step begun")

        self.wait_for(watched)

    def _step_ended(self) -> None:
        async def watched() -> None:
            self._life.reached("step ended")

        if self._life.world.faults.wait_for("step ended"):
            self.wait_for(watched)


class _Queue:
    """`relay.runtime.compute.JobQueue` between the loop and a strand."""

    def __init__(self, life: "Life", compute: SimulatedCompute) -> None:
        self._life, self._compute = life, compute
        self._draw = life.world.draw_of("queue")
        self._came = trio.Event()
        self.waiting: deque[Job | Stop] = deque()

    def put(self, job: Job | Stop) -> None:
        """On the loop."""
        self.waiting.append(job)
        self._came.set()

    def get(self) -> Job | Stop:
        """On the thread."""
        if not self.waiting:
            self._compute.wait_for(self._come)
        return self.waiting.popleft()

    def empty(self) -> bool:
        """On the thread. Something may come as it is asked."""
        if self._draw.random() < self._life.world.scenario.pace.yields:
            self._compute.wait_for(self._passes)
        return not self.waiting

    async def _come(self) -> None:
        while not self.waiting:
            self._came = trio.Event()
            await self._came.wait()

    async def _passes(self) -> None:
        await trio.sleep(self._draw.choice((0.0, 0.0, self._life.world.scenario.pace.tile_ms / 1000)) * self._draw.random())
