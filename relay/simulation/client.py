"""A client: comes, is served, perhaps leaves; comes back to a stream that can be resumed, as often as that breaks."""

from typing import TYPE_CHECKING

import trio

from relay.actors.decode import DecodeActor
from relay.clock import now_ns
from relay.errors import StreamLost
from relay.messages import Address
from relay.simulation.connection import Connection, Held
from relay.simulation.scenario import Visit
from relay.simulation.violation import Violation

if TYPE_CHECKING:
    from relay.simulation.life import Life
    from relay.simulation.world import World

_TRIES_AGAIN_S = 0.05
_TRIES = 100
_COMES_BACK = 4


class Client:
    """`outcome`: empty while it waits; of its last connection, "refused" if it found no gateway, "lost" if nothing was left to resume."""

    def __init__(self, world: "World", number: int, visit: Visit) -> None:
        self._world, self.name, self.visit = world, f"r{number}", visit
        self._draw = world.draw_of("client")
        self.connections: list[Connection] = []
        self.outcome = ""
        self.lost_because = ""

    async def run(self) -> None:
        await trio.sleep(self._world.scenario.begins_s + self.visit.arrives_s)
        life = await self._reach(f"gateway-{self.visit.gateway}")
        if life is None:
            self.outcome = "refused"
            return
        deadline_ns = now_ns() + int(self.visit.deadline_s * 1e9) if self.visit.deadline_s else 0
        connection = Connection(self._world, life, self.name, self.visit, deadline_ns)
        self.connections.append(connection)
        life.spawn(connection.submit)
        if self.visit.doubles:
            await trio.sleep(0.02 * self._draw.random())
        else:
            await connection.done.wait()
        for _ in range(_COMES_BACK):
            if not self.visit.resumes or (connection.outcome not in ("", "left", "broken")):
                break
            await trio.sleep(self.visit.returns_s * self._draw.random())
            resumed = await self._resume(deadline_ns)
            if resumed is None:
                break
            await resumed.done.wait()
            connection = resumed
        for each in self.connections:
            await each.done.wait()
        self.outcome = (self.lost_because and "lost") or connection.outcome

    async def _reach(self, name: str) -> "Life | None":
        """A gateway that takes the connection; the one of this name, or any. It may take a while."""
        for _ in range(_TRIES):
            lives = [life for life in self._world.supervisor.lives() if life.name.startswith(name) and not life.draining]
            if lives:
                life = self._draw.choice(lives)
                await life.runs()
                if not life.dead and not life.draining:
                    return life
            await trio.sleep(_TRIES_AGAIN_S)
        return None

    async def _resume(self, deadline_ns: int) -> Connection | None:
        """As `relay.http.resume` does: ask all workers what they know of it, and take over what the newest attempts are."""
        life = await self._reach("gateway-")
        if life is None:
            self.lost_because = "no gateway"
            return None
        connection = Connection(self._world, life, self.name, self.visit, deadline_ns)
        last = self.connections[-1]  # it may not have ended yet; and what comes to a worker that was asked already is not found
        placed = last.placed if last.ended_s else last.places()
        held: Held = {}
        for worker in self._world.supervisor.lives():
            await trio.sleep(0.001 * self._draw.random())
            await worker.runs()
            for actor in worker.actors.values():
                if not worker.dead and isinstance(actor, DecodeActor):
                    for decode, request_id, attempt, _ in actor.find_resumable(self.name):
                        if held.get(request_id, (decode, 0))[1] <= attempt:
                            held[request_id] = decode, attempt
        await life.runs()
        if life.dead:
            return await self._resume(deadline_ns)
        missing = [flight.request_id for flight in connection.flights if flight.request_id not in held]
        if missing:
            self._must_be_lost(missing, placed)
            self.lost_because = f"{', '.join(missing)} not there any more"
            connection.outcome, connection.error = "failed", StreamLost(self.lost_because)
            return None
        self.connections.append(connection)
        life.spawn(lambda: connection.take_over(held))
        return connection

    def _must_be_lost(self, missing: list[str], placed: dict[str, Address]) -> None:
        """What was placed is there for the grace time, if its decode worker is. A choice may have ended long before its connection, which
        reads slowly or waits for others."""
        last, now = self.connections[-1], trio.current_time()
        grace_s = self._world.scenario.pace.grace_s
        if now - last.ended_s < grace_s:
            alive = [address for life in self._world.supervisor.lives() for address in life.addresses]
            for request_id in missing:
                spoke_s = self._world.watch.spoke_s.get(request_id, 0.0)
                ended_early = now - spoke_s > grace_s  # what it said since may be on its way yet, or at a gateway that hangs
                if placed.get(request_id) in alive and not ended_early:
                    raise Violation("stream lost", f"{request_id} was placed at {placed[request_id]} and cannot be resumed")
