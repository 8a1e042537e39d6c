"""One seed from the first worker's start to the judgement. `simulate(seed)` is the whole of it."""

import random
from dataclasses import dataclass

import trio

from relay.simulation import scheduler
from relay.simulation.client import Client
from relay.simulation.connection import Connection
from relay.simulation.faults import Faults, draw_faults
from relay.simulation.judge import problems
from relay.simulation.life import Life
from relay.simulation.network import Agenda, Link
from relay.simulation.root import Root
from relay.simulation.scenario import Scenario, draw_scenario
from relay.simulation.trace import Trace
from relay.simulation.violation import Violation
from relay.simulation.watch import Watch

_CLIENTS_END_WITHIN_S = 60.0
_QUIET_WITHIN_S = 10.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run without violation came to. `errors`: typed errors that clients got, by code."""

    digest: str
    n_events: int
    n_deaths: int
    n_struck: int
    n_retries: int
    outcomes: dict[str, int]
    errors: dict[str, int]


class World:
    """Everything of one run. Random numbers come in streams by purpose, so that one more draw here changes nothing there."""

    def __init__(self, seed: int, log: list[str] | None = None, *, scenario: Scenario | None = None) -> None:
        """`scenario`: in place of the seed's own, and without faults."""
        self._seed, self._is_quiet = seed, scenario is not None
        self._draws: dict[str, random.Random] = {}
        self.scenario = scenario or draw_scenario(self.draw_of("scenario"))
        self.trace = Trace(log)
        self.is_over = False
        self.agenda = Agenda(self.draw_of("agenda"))
        self.watch = Watch(self)
        self.supervisor = Root(self)
        self.clients = [Client(self, i, visit) for i, visit in enumerate(self.scenario.visits)]
        self.poisonous = {client.name: client.visit.poison for client in self.clients if client.visit.poison is not None}

    def draw_of(self, purpose: str) -> random.Random:
        if purpose not in self._draws:
            self._draws[purpose] = random.Random(f"{purpose} {self._seed}")
        return self._draws[purpose]

    def connections(self) -> list[Connection]:
        return [connection for client in self.clients for connection in client.connections]

    def link(self, source: Life, target: Life) -> Link:
        return Link(self.agenda, self.draw_of("network"), self.scenario.pace.delay, source, target)

    async def run(self) -> Outcome:
        async with trio.open_nursery() as self.nursery:
            plan = draw_faults(self.draw_of("plan"), tuple(worker.name for worker in self.scenario.workers), self.scenario.spread_s)
            self.faults = Faults(self, [] if self._is_quiet else plan)
            self.nursery.start_soon(self.supervisor.run)
            self.nursery.start_soon(self.agenda.run)
            if self.scenario.stops_s:
                self.agenda.after(self.scenario.begins_s + self.scenario.stops_s, lambda: self.nursery.start_soon(self.supervisor.stop))
            with trio.move_on_after(_CLIENTS_END_WITHIN_S) as patience:
                async with trio.open_nursery() as clients:
                    for client in self.clients:
                        clients.start_soon(client.run)
            if patience.cancelled_caught:
                waiting = [client.name for client in self.clients if not client.outcome]
                raise Violation("no ending", f"{', '.join(waiting)} wait after {_CLIENTS_END_WITHIN_S:g} s")
            self.faults.enabled = False
            await self._settle()
            self.is_over = True
            self.nursery.cancel_scope.cancel()
        return self._outcome()

    async def _settle(self) -> None:
        """Until nothing is left of all that; what still is when nobody does anything any more is a leak."""
        found = [("", "")]
        deadline = trio.current_time() + _QUIET_WITHIN_S
        wait_s = 0.01
        while found:
            await trio.sleep(wait_s)
            wait_s *= 2
            found = problems(self)
            if found and trio.current_time() > deadline:
                raise Violation(*found[0])

    def _outcome(self) -> Outcome:
        outcomes: dict[str, int] = {}
        errors: dict[str, int] = {}
        for client in self.clients:
            outcomes[client.outcome] = outcomes.get(client.outcome, 0) + 1
        for connection in self.connections():
            if connection.error is not None:
                errors[connection.error.code] = errors.get(connection.error.code, 0) + 1
        n_retries = sum(flight.n_attempts - 1 for connection in self.connections() for flight in connection.flights)
        return Outcome(
            self.trace.digest(), self.trace.n_events, self.supervisor.n_deaths, self.faults.n_struck, n_retries, outcomes, errors
        )


def simulate(seed: int, log: list[str] | None = None) -> Outcome:
    """Play one seed; the same one plays the same, in any process. Raises Violation. `log` is filled with a line an event."""
    world: World | None = None

    async def main() -> Outcome:
        nonlocal world
        world = World(seed, log)
        return await world.run()

    try:
        return scheduler.run(main, seed)
    except Exception as error:
        cause: BaseException = error
        while isinstance(cause, BaseExceptionGroup):
            cause = cause.exceptions[0]
        if isinstance(cause, Violation):
            raise cause from error
        raise Violation("crash", f"{type(cause).__name__}: {cause}") from error
