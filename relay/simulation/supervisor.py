"""The supervisor's part: lives start, are told of each other in order on roads of their own, are reaped, and start again.

As in `relay.runtime.supervisor`: a newcomer hears who is up and who was last down before the others hear of it; `Down` comes after the
reaping. How long each of these takes is drawn, to 0 and far apart, so that an old life's end and a new one's start are told in all orders.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import trio

from relay.runtime.frames import WorkerDown
from relay.runtime.suspicion import Blame, Suspicion
from relay.simulation.life import Life
from relay.simulation.scenario import WorkerPlan

if TYPE_CHECKING:
    from relay.simulation.world import World


@dataclass(slots=True)
class Member:
    """One worker over all its lives."""

    plan: WorkerPlan
    epoch: int = 0
    life: Life | None = None
    told_until: float = 0.0  # when the last word on its way to the present life arrives
    last_down: tuple[WorkerDown, Life] | None = None


class Supervisor:
    def __init__(self, world: "World") -> None:
        self._world, self._draw = world, world.draw_of("supervisor")
        self.members = {plan.name: Member(plan) for plan in world.scenario.workers}
        self._suspicion = Suspicion()
        self.n_deaths = 0

    def start(self) -> None:
        for member in self.members.values():
            self._world.agenda.after(member.plan.starts_s, partial(self._start, member))

    def lives(self) -> list[Life]:
        """All that are up and alive."""
        return [m.life for m in self.members.values() if m.life is not None and m.life.up and not m.life.dead]

    def life_of(self, name: str) -> Life | None:
        """If it is up and alive."""
        life = self.members[name].life
        return life if life is not None and life.up and not life.dead else None

    def is_whole(self) -> bool:
        return len(self.lives()) == len(self.members)

    def ready(self, life: Life) -> None:
        member = self.members[life.name]
        for other in self.members.values():
            if other.life is not None and other.life.up and not other.life.dead:
                self._tell_up(member, other.life)
            elif other.last_down is not None:
                self._tell_down(member, *other.last_down)
        for other in self.members.values():
            if other is not member and other.life is not None and other.life.up and not other.life.dead:
                self._tell_up(other, life)
        self._tell_up(member, life)
        life.up = True
        self._world.trace.note(f"{life} is up")

    def reap(self, life: Life, reason: str, suspects: tuple[str, ...], lone: bool, blame: Blame) -> None:
        """It has just died."""
        self.n_deaths += 1
        lone = self._suspicion.convicts(suspects, lone, blame)
        if lone:
            self._world.watch.tried.update(dict.fromkeys(suspects))
        frame = WorkerDown(worker=life.name, epoch=life.epoch, actors=tuple(life.plan.actors), reason=reason, suspects=suspects, lone=lone)
        pace = self._world.scenario.pace
        self._world.agenda.after(pace.detect_s * self._draw.random(), partial(self._reaped, life, frame))

    def _reaped(self, life: Life, frame: WorkerDown) -> None:
        member = self.members[life.name]
        member.life = None
        if life.up:
            member.last_down = frame, life
            for other in self.members.values():
                if other.life is not None and other.life.up and not other.life.dead:
                    self._tell_down(other, frame, life)
        self._world.agenda.after(self._world.scenario.pace.backoff_s * self._draw.random(), partial(self._start, member))

    def _start(self, member: Member) -> None:
        member.epoch += 1
        life = member.life = Life(self._world, member.plan, member.epoch)
        member.told_until = 0.0
        load_s = self._world.scenario.pace.load_s * self._draw.random()
        self._world.agenda.after(load_s, lambda: self._world.nursery.start_soon(life.live))

    def _tell_up(self, to: Member, other: Life) -> None:
        self._tell(to, lambda life: life.hear_up(other))

    def _tell_down(self, to: Member, frame: WorkerDown, other: Life) -> None:
        self._tell(to, lambda life: life.hear_down(frame, other))

    def _tell(self, to: Member, say: Callable[[Life], None]) -> None:
        """In order, each worker on its own road."""
        life = to.life
        assert life is not None
        to.told_until = max(to.told_until, trio.current_time() + self._world.scenario.pace.told_s * self._draw.random())
        self._world.agenda.at(to.told_until, lambda: life.when_running(lambda: say(life)))
