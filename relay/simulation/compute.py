"""In the place of the compute thread: a task whose steps take virtual time, in pieces that everything else may come between.

A piece is some rows, or some blocks of one layer of a push. A hung worker stands still between two pieces; a killed one never comes to the
next. Reports reach the actors a drawn while after their step, when the next may have begun: as it is with a thread.
"""

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import trio
from numpy.typing import NDArray

from relay.engine.engine import Engine
from relay.engine.modelled_runner import ModelledRunner
from relay.engine.report import StepReport
from relay.engine.runner import Batch, Push, StepResult
from relay.engine.step import Step
from relay.messages import Key
from relay.simulation.jobs import Jobs
from relay.simulation.memory import GuardedMemory

if TYPE_CHECKING:
    from relay.simulation.life import Life


class _Abandoned(Exception):
    """Nobody wants the rest of the step."""


class SimulatedCompute(Jobs):
    """`relay.engine.host.Compute`."""

    def __init__(self, life: "Life", engine: Engine, runner: ModelledRunner) -> None:
        super().__init__()
        self._life, self._engine, self._runner = life, engine, runner
        self._draw = life.world.draw_of("compute")
        self._reports: deque[StepReport] = deque()
        self._told = trio.Event()
        self.corrupts = False  # the next piece of a push
        self._abandoned = False

    @property
    def is_idle(self) -> bool:
        return not (self._jobs or self._reports or self._engine.n_running or self._engine.n_waiting)

    async def run(self, on_results: Callable[[list[StepReport]], None]) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._tell, on_results)
            await self._turn()

    async def _turn(self) -> None:
        busy = False
        while True:
            if not busy:
                await self._come()
            await self._life.computes()
            step = self._engine.begin(self._take())
            self._life.world.watch.began(self._life, step)
            self._life.reached("step begun")
            busy = step.batch is not None
            if step.batch is not None:
                self._abandoned = False
                self._engine.launched(step, self)
                try:
                    self._engine.end(step, await self._compute(step, step.batch))
                except _Abandoned:
                    self._engine.abandon(step)
                self._life.reached("step ended")
            self.steps += 1
            self._reports.append(step.report)
            self._told.set()
            await trio.lowlevel.checkpoint()

    async def _tell(self, on_results: Callable[[list[StepReport]], None]) -> None:
        longest = self._life.world.scenario.pace.report_s
        while True:
            await self._told.wait()
            self._told = trio.Event()
            if longest:
                await trio.sleep(self._draw.choice((0.0, longest)) * self._draw.random())
            await self._life.runs()
            results = list(self._reports)
            self._reports.clear()
            on_results(results)
            self._life.world.watch.reported(self._life)

    async def _compute(self, step: Step, batch: Batch) -> StepResult:
        n_rows, draw = len(batch.tokens), self._draw
        n_tiles = -(-n_rows // self._runner.tile_rows)
        length_s = n_tiles * self._life.world.scenario.pace.tile_ms / 1000 * draw.choice((0.7, 1.0, 1.0, 3.0))
        ends = list(dict.fromkeys((draw.randint(1, n_rows), n_rows))) if draw.random() < 0.5 else [n_rows]
        first = 0
        for last in ends:
            await self._passes(length_s * (last - first) / n_rows)
            self._check(step, first, last)
            self._runner.compute(batch, first, last)
            first = last
            poison = [part.sequence for part in step.parts if part.sequence.request_id.split("/")[0] in self._life.world.poisonous]
            if poison and not self._life.dead:
                self._life.world.watch.poisoned([sequence.request_id for sequence in poison])
                self._life.die("poisoned", by_itself=True)
            self._life.reached("rows computed")
        checksums = []
        pushed = [part.sequence for part in step.parts if part.sequence.target is not None]
        for sequence, push in zip(pushed, batch.pushes, strict=True):
            checksums.append(await self._push(push, sequence.key))
        self._life.reached("all computed")
        return self._runner.draw(batch, checksums)

    async def _push(self, push: Push, request: Key) -> NDArray[np.uint64]:
        target, n = push.target, len(push.blocks)
        assert isinstance(target, GuardedMemory)
        middle = self._draw.randint(1, n) if n else 0
        for layer in range(self._runner.layout.n_layers):
            for piece in (slice(0, middle), slice(middle, n)):
                if piece.start == piece.stop:
                    continue
                await self._passes(0.0002)
                if not target.owner.dead:  # else it lands where nobody reads
                    target.pushed(push.target_blocks[piece], self._life, request)
                    self._life.world.watch.writes(self._life, target.owner, request, push.target_blocks[piece].tolist())
                self._runner.memory.copy_layer(layer, push.blocks[piece], target, push.target_blocks[piece])
                self._life.reached("blocks pushed")
                if self.corrupts:
                    self.corrupts = False
                    target.pages[layer, 0, push.target_blocks[piece.start], 0] ^= 1
        return self._runner.memory.checksums(push.blocks)

    async def _passes(self, seconds: float) -> None:
        await trio.sleep(seconds)
        await self._life.computes()
        if self._abandoned and self._draw.random() < 0.7:
            raise _Abandoned

    def abandon(self) -> None:
        """The step under way, at the next piece or later."""
        self._abandoned = True

    def _check(self, step: Step, first: int, last: int) -> None:
        """The guarded pool's question for each sequence that has rows in here."""
        batch, memory, at = step.batch, self._runner.memory, 0
        assert batch is not None
        assert isinstance(memory, GuardedMemory)
        for i, part in enumerate(step.parts):
            begin, end = max(at, first), min(at + part.n_rows, last)
            at += part.n_rows
            if begin >= end:
                continue
            size = memory.layout.block_tokens
            blocks = range(int(batch.positions[begin]) // size, int(batch.positions[end - 1]) // size + 1)
            table = [int(batch.block_table[i, n]) for n in blocks]
            memory.computes(table, borrowed=part.sequence.borrowed)
            if part.sequence.borrowed:
                self._life.world.watch.writes(self._life, self._life, part.sequence.key, table)
