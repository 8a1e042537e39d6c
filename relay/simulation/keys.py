"""The laws of keys' limits, as those tell who were granted something: no more run at once, or start in a minute, than a key may."""

from typing import TYPE_CHECKING

from relay.actors.decode import DecodeActor
from relay.actors.limiter import LimiterActor
from relay.actors.quota import QuotaActor
from relay.simulation.violation import Violation

if TYPE_CHECKING:
    from relay.simulation.connection import Connection
    from relay.simulation.life import Life
    from relay.simulation.world import World


class Keys:
    """Told of every connection that may start."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._granted: dict[str, dict[str, list[Connection]]] = {name: {} for name in world.scenario.limits}  # by key, by request

    def granted(self, connection: "Connection") -> None:
        """A run lasts less than a minute, so that whatever started before still counts, unless who counted it died. A stream that is
        resumed goes on with what it was granted, even if it had ended: then it is only read again, and does not count as running."""
        visit, limits = connection.visit, connection.caller.limits
        granted = self._granted[visit.key]
        is_new = connection.name not in granted
        granted.setdefault(connection.name, []).append(connection)
        running = [
            name
            for name, each in granted.items()
            if any(one.is_metered and not one.life.dead for one in each) and (len(each) == 1 or self._is_computed(name))
        ]
        if is_new and limits.concurrency and len(running) > limits.concurrency:
            raise Violation("limits", f"{running} of the key {visit.key} run at once; its limit is {limits.concurrency}")
        survived = not self._world.supervisor.has_restarted("gateway")
        if survived and limits.requests and len(granted) > limits.requests:
            raise Violation("limits", f"{list(granted)} of the key {visit.key} were granted; its limit is {limits.requests}")

    def _is_computed(self, name: str) -> bool:
        """Whether a decode worker still holds any of its sequences."""
        decoding = (actor for life in self._world.supervisor.lives() for actor in life.actors.values() if isinstance(actor, DecodeActor))
        return any(request_id.split("/")[0] == name for actor in decoding for request_id, _ in actor._entries)

    def may_refuse(self, connection: "Connection") -> bool:
        """Whether all that its key has asked for is too much."""
        limits, others = connection.caller.limits, [c.visit for c in self._world.clients if c.visit.key == connection.visit.key]
        n_tokens = sum(len(wish.prompt) + wish.stopping.max_tokens for visit in others for wish in visit.wishes)
        return any(
            limit and wanted > limit
            for limit, wanted in zip(
                (limits.requests, limits.concurrency, limits.tokens), (len(others), len(others), n_tokens), strict=True
            )
        )


def held(life: "Life") -> list[str]:
    """Requests that somebody there believes to run."""
    accounts = [actor._accounts for actor in life.actors.values() if isinstance(actor, QuotaActor | LimiterActor)]
    return [use.request_id for account in accounts for use in account._uses.values() if use.is_open]
