"""The fault plan of a seed: what happens to whom, at a time or where something has happened for the n-th time.

Points are message boundaries (sent, took, handled, each by message type) and places inside a step. A fault that waits for a point which
never comes does not happen.
"""

import random
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import trio

from relay.runtime.frames import Fault

if TYPE_CHECKING:
    from relay.simulation.life import Life
    from relay.simulation.world import World

_MAIL = ("Announced", "Cached", "Admit", "Expect", "Placed", "Declined", "Prefill", "Tokens", "Prefilled", "Revoke", "Returned", "Left")
_MORE_MAIL = ("Displaced", "Cancel", "Refused", "Up", "Down")
_STEP = ("step begun", "rows computed", "blocks pushed", "all computed", "step ended")
_ACTIONS = ("kill", "kill", "kill", "end", "crash", "hang", "jam", "pause", "pause", "cut", "cut", "corrupt", "corrupt", "drain", "drain")


@dataclass(slots=True)
class PlannedFault:
    """`point` empty: at `at_s`, to `worker`; else to whoever reaches it for the `left`-th time."""

    action: str
    at_s: float
    worker: str
    point: str
    left: int


def draw_faults(draw: random.Random, workers: tuple[str, ...], spread_s: float) -> list[PlannedFault]:
    faults = []
    favourite = draw.choice((None, None, draw.choice(workers)))
    for _ in range(draw.choice((0, 1, 1, 2, 3, 4, 6))):
        action = draw.choice(_ACTIONS)
        verb = draw.choice(("sent", "took", "handled"))
        point = draw.choice((f"{verb} {draw.choice(_MAIL)}", f"{verb} {draw.choice(_MAIL + _MORE_MAIL)}", draw.choice(_STEP)))
        if action == "corrupt":
            point = "blocks pushed"
        elif draw.random() < 0.4:
            point = ""
        worker = favourite or draw.choice(workers)
        faults.append(PlannedFault(action, 1.75 * spread_s * draw.random(), worker, point, draw.choice((1, 2, 4, 9)) if point else 0))
    return faults


class Faults:
    """Of one run. Every fault strikes once. `n_corrupted`: pushes damaged."""

    def __init__(self, world: "World", plan: list[PlannedFault]) -> None:
        self._world, self._draw = world, world.draw_of("faults")
        self._waiting: dict[str, list[PlannedFault]] = {}
        self.n_corrupted = self.n_struck = 0
        self.too_large: dict[str, None] = {}  # requests of which a message fitted in no frame
        self.enabled = True
        for fault in plan:
            if fault.point:
                self._waiting.setdefault(fault.point, []).append(fault)
            else:
                world.agenda.after(world.scenario.begins_s + fault.at_s, partial(self._strike_worker, fault))
        draw = world.draw_of("frames")  # of its own, so that what else happens in a seed stays what it was
        if draw.random() < 0.2 and world.scenario.window >= 100:
            worker, at_s = draw.choice(world.scenario.workers).name, 1.75 * world.scenario.spread_s * draw.random()
            world.agenda.after(world.scenario.begins_s + at_s, partial(self._outgrow, worker))
        draw = world.draw_of("spares")
        if world.scenario.runtime.spares:  # some two seconds after the last worker was up they are made
            root = world.supervisor
            at_s, what = draw.choice(((1.5, root.no_process), (2.6, root.no_process), (2.4, root.kill_spares), (2.4, root.stop_spares)))
            world.agenda.after(at_s, what)

    def wait_for(self, point: str) -> bool:
        """Whether any fault is to strike there."""
        return bool(self._waiting.get(point))

    def reached(self, point: str, life: "Life") -> None:
        waiting = self._waiting.get(point)
        if waiting and self.enabled and not life.dead and trio.current_time() >= self._world.scenario.begins_s:
            for fault in list(waiting):
                fault.left -= 1
                if fault.left == 0:
                    waiting.remove(fault)
                    self._strike(fault, life)

    def _outgrow(self, worker: str) -> None:
        """The next attempt that it passes on is larger than a frame."""
        life = self._world.supervisor.life_of(worker)
        if life is not None and self.enabled:
            life.n_too_large += 1

    def _strike_worker(self, fault: PlannedFault) -> None:
        life = self._world.supervisor.life_of(fault.worker)
        if life is not None and self.enabled:
            self._strike(fault, life)

    def _strike(self, fault: PlannedFault, life: "Life") -> None:
        agenda, pace, draw = self._world.agenda, self._world.scenario.pace, self._draw
        self.n_struck += 1
        self._world.trace.note(f"{fault.action} {life} at {fault.point or 'its time'}")
        match fault.action:
            case "kill":
                life.die("SIGKILL")
            case "end":
                self._world.supervisor.supervisor.kill(life.name)
            case "crash":
                life.die("SIGSEGV")
            case "hang":
                life.pause()
            case "jam":
                life.jam()
            case "pause":
                life.pause()
                agenda.after(pace.silent_s * 0.6 * draw.random(), life.go_on)
            case "cut":
                self._cut(life)
            case "drain":
                if not life.name.startswith("router"):
                    self._world.supervisor.supervisor.recycle(life.name, pace.drain_s + 0.3)
            case "corrupt":
                if life.compute is not None:
                    life.compute.corrupt()
                    self.n_corrupted += 1

    def _cut(self, life: "Life") -> None:
        """Both directions to one peer. Past the deadline one of the two is fenced."""
        others = [other for other in life.links if not other.dead and life in other.links]
        if not others:
            return
        other, deadline_s = self._draw.choice(others), self._world.scenario.pace.link_deadline_s
        length_s = 0.1 * self._draw.random()
        for link in (life.links[other], other.links[life]):
            link.cut_until = max(link.cut_until, trio.current_time() + length_s)
        self._world.trace.note(f"between {life} and {other} for {length_s:.4f} s")
        if length_s > deadline_s:
            one, two = self._draw.sample((life, other), 2)
            self._world.agenda.after(deadline_s, lambda: one.child.say(Fault(worker=two.name, epoch=two.epoch)))
