"""The root process on virtual time: the real supervisor over simulated children, and laws on what it does.

It starts, fences, restarts and drains as ever. How long a death takes to be seen, and each word to arrive, is drawn, to 0 and far apart, so
that an old life's end and a new one's start are told in all orders.
"""

import errno
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from relay.errors import StartError
from relay.runtime.frames import Control, Drain, Start, WorkerDown
from relay.runtime.incarnation import Incarnation
from relay.runtime.supervisor import Supervisor, WorkerSpec
from relay.simulation.child import SimulatedChild
from relay.simulation.life import Life
from relay.simulation.violation import Violation

if TYPE_CHECKING:
    from relay.simulation.world import World

_NOWHERE = Path("/nonexistent")  # no link of a life has a socket


@dataclass(frozen=True, slots=True)
class Death:
    """`incarnation`: as the supervisor sees that life, with its last word on it once it has looked."""

    at_s: float
    incarnation: Incarnation
    how: str

    def is_announced(self) -> bool:
        return self.incarnation._announced or (self.how == "exit 0" and self.incarnation.state == "draining")


class Root:
    """`supervisor`: the real one. `has_given_up`: it has ended the server, since a worker died too often."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._children: dict[int, SimulatedChild] = {}  # by pid
        self._no_process_until = 0.0
        self.plans = {plan.name: plan for plan in world.scenario.workers}
        specs = [
            WorkerSpec(
                plan.name,
                drain_rank=plan.drain_rank,
                suspects=partial(self._notice, plan.name),
                roles=tuple(role for role in plan.roles() if role not in plan.roles(reserve=True)),
                reserve=plan.roles(reserve=True),
            )
            for plan in world.scenario.workers
        ]
        self.supervisor = Supervisor(_NOWHERE, specs, world.scenario.runtime, (), self._hears, child=self._child)
        self._lives: dict[tuple[str, int], Life] = {}
        self.newest: dict[str, Life] = {}
        self._deaths: dict[str, list[Death]] = {name: [] for name in self.plans}
        self.n_deaths = 0
        self.has_given_up = self.is_stopping = False

    async def run(self) -> None:
        """Until it has drained, or gives up."""
        try:
            await self.supervisor.run()
        except StartError:
            self.has_given_up = True

    async def stop(self) -> None:
        """The whole server, rank after rank."""
        self.is_stopping = True
        began_s, within_s = trio.current_time(), self._world.scenario.pace.drain_s
        await self.supervisor.drain(within_s)
        if trio.current_time() > began_s + within_s + 2 * len(dict.fromkeys(plan.drain_rank for plan in self.plans.values())):
            raise Violation("drain", f"the server has drained for {trio.current_time() - began_s:g} s; it had {within_s:g} s")

    def lives(self) -> list[Life]:
        """All that are up and alive."""
        return [life for name in self.plans if (life := self.life_of(name)) is not None]

    def life_of(self, name: str) -> Life | None:
        """If it is up and alive."""
        life = self.newest.get(name)
        return life if life is not None and life.up and not life.dead else None

    def life(self, name: str, epoch: int) -> Life:
        return self._lives[name, epoch]

    def is_whole(self) -> bool:
        return self.has_given_up or self.is_stopping or len(self.lives()) + len(self.supervisor.resting()) == len(self.plans)

    def has_restarted(self, prefix: str) -> bool:
        """Whether any worker of such a name is not in its first life."""
        return any(life.epoch > 1 for name, life in self.newest.items() if name.startswith(prefix))

    # --- of children

    def _child(self) -> SimulatedChild:
        if trio.current_time() < self._no_process_until:
            raise BlockingIOError(errno.EAGAIN, "no process left")
        child = self._children[len(self._children) + 1] = SimulatedChild(self._world, len(self._children) + 1)
        return child

    def no_process(self) -> None:
        """For a while none can be started."""
        self._world.trace.note("no process can be started for some seconds")
        self._no_process_until = trio.current_time() + 3.0

    def kill_spares(self) -> None:
        for pid in self.supervisor.spares():
            self._world.trace.note(f"spare {pid} dies")
            self._children[pid].ends("SIGKILL")

    def stop_spares(self) -> None:
        """They live, and never do anything again."""
        for pid in self.supervisor.spares():
            self._world.trace.note(f"spare {pid} stands still")
            self._children[pid].is_stuck = True

    def load(self, child: SimulatedChild, start: Start) -> None:
        """A process has its life."""
        if not child.is_alive():
            return
        plan, pace = self.plans[start.worker], self._world.scenario.pace
        self._is_in_time(start)
        life = child.life = self._lives[start.worker, start.epoch] = self.newest[start.worker] = Life(self._world, plan, start.epoch, child)
        load_s = pace.load_s * self._world.draw_of("load").random() + (plan.starts_s if start.epoch == 1 else 0.0)
        self._world.agenda.after(load_s, partial(self._begin, life))

    def _begin(self, life: Life) -> None:
        if not life.dead:
            self._world.nursery.start_soon(life.live)

    def hears_ready(self, life: Life) -> None:
        """From here on it is up."""
        life.up = True
        self._world.trace.note(f"{life} is up")

    def died(self, life: Life, how: str) -> None:
        """It has just happened; the supervisor has yet to see it."""
        if self._world.is_over:
            return
        self.n_deaths += 1
        incarnation = self.supervisor._members[life.name].life
        assert incarnation is not None
        self._deaths[life.name].append(Death(trio.current_time(), incarnation, how))

    def tells(self, child: SimulatedChild, frame: Control) -> None:
        """The supervisor writes this to one of them."""
        if isinstance(frame, WorkerDown):
            life = self.life(frame.worker, frame.epoch)
            if frame.lone:
                self._world.watch.tried.update(dict.fromkeys(frame.suspects))
            if not life.dead:
                raise Violation("told of a death", f"{life} lives, and others are told that it is dead")
            if life.is_jammed and frame.reason.startswith("hung") and frame.suspects != life.board.notice[0]:
                raise Violation("suspects", f"{life} hung in a step of {life.board.notice[0]}, and {frame.suspects} are suspected")
        if isinstance(frame, Drain) and self.is_stopping and child.life is not None:
            earlier = [life for life in self.lives() if life.plan.drain_rank < child.life.plan.drain_rank]
            if earlier:
                raise Violation("drain", f"{child.life} is to drain before {earlier[0]} has ended")

    def _notice(self, name: str) -> tuple[tuple[str, ...], bool]:
        """The step board of a life that is over."""
        return self.newest[name].board.notice

    def _hears(self, event: str, /, **fields: str | int | float) -> None:
        """The supervisor's events."""
        if event in ("worker_rests", "worker_refused"):
            name = str(fields["worker"])
            resting = self.supervisor.resting()
            others = [plan for plan in self.plans.values() if plan.name != name and plan.name not in resting]
            served = all(any(role in plan.roles() for plan in others) for role in self.plans[name].roles())
            if event == "worker_rests" and not served:
                raise Violation("restarts", f"{name} rests, and nobody else can do what it does")
            if (
                event == "worker_refused"
                and not self._no_process_until
                and len(self._unwanted(name)) <= self._world.scenario.runtime.max_restarts
            ):
                raise Violation("restarts", f"the server ends: {fields['reason']}")

    def _unwanted(self, name: str) -> list[float]:
        """When it died of late, though nobody had announced that."""
        since_s = trio.current_time() - self._world.scenario.runtime.within_s
        return [death.at_s for death in self._deaths[name] if death.at_s >= since_s and not death.is_announced()]

    def _is_in_time(self, start: Start) -> None:
        """A new life after those that died is not too early."""
        runtime, deaths, now = self._world.scenario.runtime, self._unwanted(start.worker), trio.current_time()
        n = len(deaths)
        if deaths and deaths[-1] == self._deaths[start.worker][-1].at_s:
            soon_s = min(runtime.first_backoff_s * 2.0 ** (n - 1), runtime.most_backoff_s)
            wait_s = soon_s if n <= runtime.max_restarts else runtime.most_backoff_s
            if now - deaths[-1] < wait_s - 1e-6:
                raise Violation("restarts", f"{start.worker} starts {now - deaths[-1]:g} s after its death number {n}, not {wait_s:g} s")
