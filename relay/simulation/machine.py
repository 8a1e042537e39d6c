"""What computes steps in the simulation: launched by the compute thread, over after virtual time, in pieces that anything may come between.

A piece is some rows, or some blocks of one layer of a push. A hung worker stands still between two pieces; a killed one never comes to the
next. Where steps go on beside the host, they do so from their launch on, else from when somebody waits for them.
"""

from typing import TYPE_CHECKING

import numpy as np
import trio
from numpy.typing import NDArray

from relay.clock import now_ns
from relay.engine.modelled_runner import ModelledRunner
from relay.engine.runner import Batch, Push, StepResult
from relay.engine.sequence import Sequence
from relay.engine.step import Step
from relay.messages import Key
from relay.simulation.memory import GuardedMemory
from relay.simulation.violation import Violation

if TYPE_CHECKING:
    from relay.simulation.life import Life


class _Abandoned(Exception):
    """Nobody wants the rest of the step."""


class Machine(ModelledRunner):
    """`Launches`. corrupts: the next piece of a push."""

    def __init__(self, life: "Life", memory: GuardedMemory, vocab_size: int, tile_rows: int, *, beside: bool) -> None:
        super().__init__(memory, vocab_size, tile_rows)
        self.life, self.beside, self.corrupts = life, beside, False
        self.draws = life.world.draw_of("machine")

    def prepare(self, batch: Batch) -> None:
        """See `Launches.prepare`: nothing is prepared here."""

    def launch(self, batch: Batch) -> "Launched":
        """See `Launches.launch`. From the compute thread."""
        launched = Launched(self, batch)
        if self.beside:
            launched.start()
        return launched


class Launched:
    """`Pending`."""

    def __init__(self, machine: Machine, batch: Batch) -> None:
        self._machine, self._life, self._batch, self._draw = machine, machine.life, batch, machine.draws
        self._result: StepResult | None = None
        self._over, self._abandoned = trio.Event(), False

    def start(self) -> None:
        """The loop computes it from its next turn on."""
        assert self._life.compute is not None
        self._life.compute.spawn(self._run)

    def abandon(self) -> None:
        """See `Abandonable`: at the next piece or later."""
        self._abandoned = True

    def result(self) -> StepResult:
        """See `Pending`. On the compute thread."""
        assert self._life.compute is not None
        if not self._machine.beside:
            self.start()
        self._life.compute.wait_for(self._over.wait)
        assert self._result is not None
        return self._result

    async def _run(self) -> None:
        assert self._life.compute is not None
        step = self._life.compute.step
        if step is None or step.batch is not self._batch:
            raise Violation("steps", f"{self._life} computes what is not the batch of its step")
        began_ns = now_ns()
        try:
            self._result = await self._compute(step)
            self._life.world.watch.computed(self._life, step, now_ns() - began_ns)
        except _Abandoned:
            self._result = StepResult([], [], [], abandoned=True)
        self._over.set()

    async def _compute(self, step: Step) -> StepResult:
        machine, batch, draw, world = self._machine, self._batch, self._draw, self._life.world
        n_rows = len(batch.tokens)
        n_tiles = -(-n_rows // machine.tile_rows)
        length_s = n_tiles * world.scenario.pace.tile_ms / 1000 * draw.choice((0.7, 1.0, 1.0, 3.0))
        ends = list(dict.fromkeys((draw.randint(1, n_rows), n_rows))) if draw.random() < 0.5 else [n_rows]
        first = 0
        for last in ends:
            await self._passes(length_s * (last - first) / n_rows)
            if sorted(self._life.board.notice[0]) != sorted(part.sequence.request_id for part in step.parts):
                raise Violation("suspects", f"{self._life} computes {step.parts}, and would name {self._life.board.notice[0]} if it died")
            self._check(step, first, last)
            machine.compute(batch, first, last)
            first = last
            poison = [part.sequence.request_id for part in step.parts if self._is_poison(part.sequence)]
            if poison and not self._life.dead:
                world.watch.poisoned(poison)
                self._life.die("SIGSEGV")
            self._life.reached("rows computed")
        checksums = []
        pushed = [part.sequence for part in step.parts if part.sequence.target is not None]
        for sequence, push in zip(pushed, batch.pushes, strict=True):
            checksums.append(await self._push(push, sequence.key))
        self._life.reached("all computed")
        return machine.draw(batch, checksums)

    def _is_poison(self, sequence: Sequence) -> bool:
        harmless = self._life.world.poisonous.get(sequence.request_id.split("/")[0])
        return harmless is not None and sequence.n_generated >= harmless

    async def _push(self, push: Push, request: Key) -> NDArray[np.uint64]:
        machine, target, n = self._machine, push.target, len(push.blocks)
        assert isinstance(target, GuardedMemory)
        middle = self._draw.randint(1, n) if n else 0
        for layer in range(machine.layout.n_layers):
            for piece in (slice(0, middle), slice(middle, n)):
                if piece.start == piece.stop:
                    continue
                await self._passes(0.0002)
                if not target.owner.dead:  # else it lands where nobody reads
                    target.pushed(push.target_blocks[piece], self._life, request)
                    self._life.world.watch.writes(self._life, target.owner, request, push.target_blocks[piece].tolist())
                machine.memory.copy_layer(layer, push.blocks[piece], target, push.target_blocks[piece])
                self._life.reached("blocks pushed")
                if machine.corrupts:
                    machine.corrupts = False
                    target.pages[layer, 0, push.target_blocks[piece.start], 0] ^= 1
        return machine.memory.checksums(push.blocks)

    async def _passes(self, seconds: float) -> None:
        await trio.sleep(seconds)
        await self._life.computes()
        if self._abandoned and self._draw.random() < 0.7:
            raise _Abandoned

    def _check(self, step: Step, first: int, last: int) -> None:
        """The guarded pool's question for each sequence that has rows in here."""
        batch, memory, at = self._batch, self._machine.memory, 0
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
