"""The laws of the end: every request ended once and right, and nothing is left of any, anywhere.

`problems` is asked again and again until it finds none or time is up, so it may see a run that has not come to rest.
"""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from relay.actors.decode import DecodeActor
from relay.actors.gateway import Flight
from relay.actors.router import RouterActor
from relay.errors import (
    ContextTooLong,
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    Overloaded,
    PoisonRequest,
    RateLimited,
    RequestTooLarge,
    StreamLost,
    Unavailable,
)
from relay.policy.cache_index import CacheIndex, hints
from relay.policy.poison import digests
from relay.simulation.client import Client
from relay.simulation.connection import Connection
from relay.simulation.keys import held
from relay.simulation.life import Life

if TYPE_CHECKING:
    from relay.simulation.world import World

Problem = tuple[str, str]
_REQUEST = re.compile(r"r\d+(/\d+)?")
_MAY_REMEMBER = ("_tombstones", "_lengths")


def problems(world: "World") -> list[Problem]:
    """(law, text) of each, the worst first."""
    found = [problem for client in world.clients for problem in _of_client(world, client)]
    if not world.supervisor.is_whole():
        found.append(("restart", "a worker is not up again"))
    for life in world.supervisor.lives():
        found += _of_blocks(life)
        found += _of_actors(life)
        found += _of_node(world, life)
    return found


def _of_client(world: "World", client: Client) -> Iterator[Problem]:
    for flight, wish in ((f, w) for c in client.connections for f, w in zip(c.flights, client.visit.wishes, strict=True)):
        ids, right = tuple(flight.ids), wish.right
        if ids != right.ids[: len(ids)]:
            yield "tokens", f"{flight.request_id} got {ids}, expected {right.ids}"
        if flight.finish is not None and (ids, flight.finish) != (right.ids, right.finish):
            yield "tokens", f"{flight.request_id} finished ({flight.finish}) with {ids}, expected {right.ids} ({right.finish})"
        if flight.finish is not None and flight.error is not None:
            yield "no ending", f"{flight.request_id} ended twice"
        if len(flight.logprobs) != (len(ids) if wish.sampling.logprobs >= 0 else 0):
            yield "tokens", f"{flight.request_id} has {len(flight.logprobs)} log probabilities for {len(ids)} tokens"
    for connection in client.connections:
        if connection.error is not None and not _is_explained(world, connection):
            yield "error without a cause", f"{client.name}: {type(connection.error).__name__}: {connection.error}"


def _is_explained(world: "World", connection: Connection) -> bool:
    scenario, visit, error = world.scenario, connection.visit, connection.error
    most = max(flight.failures for flight in connection.flights)
    match error:
        case PoisonRequest():
            return visit.poison is not None or any(_is_like_one_that_killed(world, flight) for flight in connection.flights)
        case Unavailable():
            return most <= world.supervisor.n_deaths + world.faults.n_corrupted and most >= scenario.max_attempts
        case Overloaded():
            waited = error.message.startswith("no worker had a place") and scenario.router.queue_timeout_s < 100
            fresh = all(not flight.ids for flight in connection.flights if flight.error is error)
            return waited or (fresh and scenario.needs_patience)
        case ContextTooLong():
            return not all(scenario.has_room_for(wish) for wish in visit.wishes)
        case DeadlineExceeded():
            return visit.deadline_s > 0
        case StreamLost():
            return visit.resumes and (visit.doubles or world.faults.n_struck > 0 or visit.patience_s < 100)
        case RequestTooLarge():
            return any(flight.request_id in world.faults.too_large for flight in connection.flights)
        case RateLimited() | InvalidRequest():
            return world.watch.keys.may_refuse(connection)
        case Draining():
            return connection.life.draining
        case _:
            return False


def _is_like_one_that_killed(world: "World", flight: Flight) -> bool:
    """Whether it was convicted, rightly or by chance, or is the same as one that was."""
    culprits = (
        other
        for client in world.clients
        for connection in client.connections
        for other in connection.flights
        if client.visit.poison is not None or other.request_id in world.watch.tried
    )
    return any(_digests(other)[bool(other.ids)] in _digests(flight) for other in culprits)


def _digests(flight: Flight) -> tuple[bytes, bytes]:
    return digests(flight.prompt, flight.sampling, flight.prompt_logprobs)


def _of_blocks(life: Life) -> Iterator[Problem]:
    if life.compute is None:
        return
    counts = life.book.counts()
    if counts.audit() or counts.free + counts.cached != counts.total:
        yield "blocks", f"{life}: {counts}"
    if life.book._reserved:
        yield "blocks", f"{life}: {life.book._reserved} reserved for nobody"
    if not life.compute.is_idle or not life.engine._line.is_clear:
        yield "blocks", f"{life}: its engine holds {life.engine.n_running} running, {life.engine.n_waiting} waiting"


def _of_actors(life: Life) -> Iterator[Problem]:
    for request_id in held(life):
        yield "limits", f"{life} counts {request_id} as running"
    for name, actor in life.actors.items():
        for attribute, value in (*vars(actor).items(), *(vars(actor._logs).items() if isinstance(actor, DecodeActor) else ())):
            if attribute not in _MAY_REMEMBER and not attribute.startswith("_context"):
                for left in _requests(value):
                    yield "left behind", f"{name}@{life.epoch}.{attribute} still holds {left}"
        if isinstance(actor, RouterActor):
            for worker in (*actor._prefill.values(), *actor._decode.values()):
                if worker.load or worker.placed or worker.coming:
                    yield "loads", f"{name}@{life.epoch} believes {worker.address} to hold {worker.placed}"


def _requests(value: Any, depth: int = 0) -> Iterator[str]:
    """Keys that name a request of ours (`r7`, `r7/1`), in a container of an actor."""
    if isinstance(value, dict) and depth <= 2:
        for key, inner in value.items():
            parts = key if isinstance(key, tuple) else (key,)
            if any(isinstance(part, str) and _REQUEST.fullmatch(part) for part in parts):
                yield str(key)
            yield from _requests(inner, depth + 1)


def _of_node(world: "World", life: Life) -> Iterator[Problem]:
    """Credits come home but for what is owed, and nothing waits."""
    node, window = life.node, world.scenario.window
    if node._early:
        yield "left behind", f"{life} holds mail for {list(node._early)}"
    for to, lane in node._lanes.items():
        owed = 0
        for other in world.supervisor.lives():
            if to in other.addresses:
                owed = other.node._owed[(node.worker, node.epoch), to]
                if lane.free + owed != window or lane.n_late:
                    yield "credits", f"{life} has {lane.free} credits of {window} towards {to}, which owes {owed}"
    for router in world.supervisor.lives():
        for actor in router.actors.values():
            if isinstance(actor, RouterActor) and life.compute is not None:
                epoch, index = actor._caches.get(life.name, (0, None))
                if index is None or epoch != life.node.epoch:
                    yield "cache index", f"{router} has none of {life}"
                    continue
                untold = life.book._changes
                told = CacheIndex(hints(index._hints))
                told.change(hints(key for key, here in untold.items() if here), hints(key for key, here in untold.items() if not here))
                if told._hints.keys() != CacheIndex(hints(life.book._by_key))._hints.keys():
                    yield "cache index", f"{router} believes {len(told)} blocks to be cached at {life}, {len(life.book._by_key)} are"
    if life.pools is not None:
        alive = [address for other in world.supervisor.lives() for address in other.addresses]
        for address in life.pools.open_addresses:
            if address not in alive:
                yield "left behind", f"{life} still maps the pool of {address}"
