"""The ASGI application: every request passes its edge, where it gets its ID and its ledger and where every error becomes an answer."""

import itertools
import os
import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import quote, unquote

import structlog
import trio
from starlette.routing import Match, Route, Router

from relay.auth.metrics import KeyMetrics
from relay.clock import now_ns
from relay.errors import (
    ClientGone,
    Draining,
    Forbidden,
    HttpVersionNotServed,
    MethodNotAllowed,
    NotFound,
    RequestError,
    Unauthorized,
    first_cause,
)
from relay.http.access import Access
from relay.http.body_budget import BodyBudget
from relay.http.cors import Cors
from relay.http.exchange import Exchange, Receive, Scope, Send
from relay.http.records import Records, record
from relay.http.turns import Pace, Turns
from relay.ledger.metrics import GatewayMetrics
from relay.ledger.spans import Span
from relay.openai.stream import error_event

log = structlog.get_logger()

_INSIDE = ("/admin", "/debug")
_SHOWN_PATH = 128

Handler = Callable[[Exchange], Awaitable[None]]


class Application:
    """`generation` routes make tokens and are metered; `plain` ones answer about the server."""

    def __init__(
        self,
        generation: Mapping[str, Handler],
        plain: Mapping[str, Handler],
        access: Access,
        cors: Cors,
        metrics: GatewayMetrics,
        key_metrics: KeyMetrics,
        records: Records,
        bodies: BodyBudget,
        turns: Turns,
    ) -> None:
        """Routes as `METHOD /path/{name}`; path parameters are found in `exchange.scope["path_params"]`."""
        self._access, self._cors, self._bodies, self._turns = access, cors, bodies, turns
        self._metrics, self._key_metrics, self._records = metrics, key_metrics, records
        self._handlers: dict[str, Handler] = {**generation, **plain}
        self._generation = generation
        self._paths = frozenset(name.split()[1] for name in self._handlers)
        self._metered = frozenset(name.split()[1] for name in generation)
        self._router = Router([Route(name.split()[1], _never, methods=[name.split()[0]], name=name) for name in self._handlers])
        self._life = os.urandom(5).hex()
        self._numbers = itertools.count(1)
        self.draining = False
        self._in_flight = 0
        self._idle = trio.Event()
        self._idle.set()

    def next_request_id(self) -> str:
        """Unique among all gateways and lives of this server, and not to be guessed: it gives access to a resumable stream."""
        return f"r{self._life}-{next(self._numbers)}-{secrets.token_hex(10)}"

    async def until_idle(self) -> None:
        """Return when no generation runs."""
        while self._in_flight:
            await self._idle.wait()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await _refuse_other(scope, receive, send)
            return
        exchange = Exchange(scope, receive, send, self.next_request_id(), self._bodies)
        exchange.headers.update(self._cors.headers(scope))
        self._records.opened(exchange)
        try:
            if (preflight := self._cors.preflight(scope)) is not None:
                await exchange.respond(200, b"", headers=preflight)
                return
            name = self._enter(exchange)
            if name in self._generation:
                await self._generate(exchange, self._handlers[name])
            else:
                await self._handlers[name](exchange)
        except RequestError as error:
            await self._refuse(exchange, error)
        except Exception as error:  # the outer edge: a defect of ours becomes a typed error, with the traceback in the log
            exchange.log.exception("a request failed by a defect")
            name = type(first_cause(error)).__name__
            await self._refuse(exchange, RequestError(f"an internal error ({name}); it is in the server's log"))
        finally:
            exchange.release_body()
            try:
                self._ended(exchange)
            finally:  # whatever a log or a metric raises
                self._records.dropped(exchange)
                exchange.over.set()
                if exchange.error is not None:  # its frames hold this exchange and its body: a cycle that only a full collection would end
                    exchange.error.__traceback__ = exchange.error.__context__ = None
            if exchange.has_entered and exchange.route in self._metered:
                with trio.CancelScope(shield=True):
                    await observe_tokens(self._metrics, exchange.ledger.start_ns, exchange.token_ns, self._turns.pace())

    def _enter(self, exchange: Exchange) -> str:
        """Through the door to a route. Who has no key learns nothing of what routes there are."""
        name = ""
        wrong: RequestError | None = None
        try:
            name = self._route(exchange)
        except (NotFound, MethodNotAllowed) as error:
            wrong = error
        try:
            exchange.enter(self._access.enter(exchange.scope, exchange.route if name else None))
        except (Unauthorized, Forbidden) as error:
            self._key_metrics.refused(error.status)
            raise
        finally:
            exchange.ledger.close(Span.GATEWAY_AUTH, now_ns())
        if wrong is not None:
            raise wrong
        return name

    def _route(self, exchange: Exchange) -> str:
        scope = exchange.scope
        scope["path"] = _path(scope)
        if not scope.get("http_version", "1.1").startswith("1."):
            raise HttpVersionNotServed("only HTTP/1.1 is served here")
        partial = None
        for route in self._router.routes:
            assert isinstance(route, Route)
            match, child = route.matches(scope)
            if match is Match.FULL:
                scope.update(child)
                exchange.route = route.path
                return route.name
            if match is Match.PARTIAL:
                partial = route
        if partial is not None:
            allowed = tuple(sorted(partial.methods or ()))
            wrong = MethodNotAllowed(f"{scope['method']} is not served on {_shown(scope['path'])}; use {' or '.join(allowed)}")
            wrong.allowed = allowed
            raise wrong
        raise NotFound(f"there is no {_shown(scope['path'])} here")

    async def _generate(self, exchange: Exchange, handler: Handler) -> None:
        if self.draining:
            raise Draining("the server is going down; try again on another or later", retry_after_s=5.0)
        self._in_flight += 1
        self._metrics.in_flight.inc()
        if self._in_flight == 1:
            self._idle = trio.Event()
        try:
            await handler(exchange)
        finally:
            self._in_flight -= 1
            self._metrics.in_flight.dec()
            if self._in_flight == 0:
                self._idle.set()

    async def _refuse(self, exchange: Exchange, error: RequestError) -> None:
        exchange.error = error
        if isinstance(error, ClientGone):
            return
        if not exchange.started:
            await exchange.refuse(error)
        else:
            await exchange.end_stream(error_event(error, exchange.public_id))

    def _ended(self, exchange: Exchange) -> None:
        ledger = exchange.ledger
        ledger.close(Span.UNACCOUNTED, now_ns())
        status = exchange.error.status if exchange.error is not None else exchange.status
        metrics = self._metrics
        metrics.requests.labels(route=exchange.route if exchange.route in self._paths else "other", status=str(status)).inc()
        if exchange.route not in self._metered:
            return
        if exchange.has_entered:  # a stranger's attempts must not push out the records of others
            metrics.ended(ledger)
            metrics.prompt_tokens.inc(exchange.n_prompt)
            metrics.cached_tokens.inc(exchange.n_cached)
            metrics.generated_tokens.inc(exchange.n_generated)
            if exchange.caller.name is not None:
                self._key_metrics.ended(exchange.caller.name, status, exchange.n_prompt, exchange.n_generated)
            self._records.keep(record(exchange))
        exchange.log.info(
            "request",
            route=exchange.route,
            status=status,
            error=exchange.error.code if exchange.error else None,
            prompt_tokens=exchange.n_prompt,
            completion_tokens=exchange.n_generated,
            finish=exchange.finish_reasons,
            attempts=exchange.attempts,
            wall_ms=round(ledger.wall_ns / 1e6, 1),
        )


def _path(scope: Scope) -> str:
    """As routes are written: slashes that are doubled or at the end do not count, and an encoded one is none, so that a filter in front
    which looks for `/admin` or `/debug` sees what is meant. Those two are taken as they stand for the same reason."""
    raw: bytes = scope.get("raw_path") or quote(scope["path"]).encode()
    path = "/".join(unquote(part).replace("/", "%2F") for part in raw.decode("latin-1").split("/"))
    plain = "/" + "/".join(part for part in path.split("/") if part)
    return path if plain.startswith(_INSIDE) else plain


def _shown(path: str) -> str:
    return path if len(path) <= _SHOWN_PATH else f"{path[:_SHOWN_PATH]}... ({len(path)} characters)"


async def observe_tokens(metrics: GatewayMetrics, start_ns: int, choices: list[list[int]], pace: Pace) -> None:
    """A long answer of many choices has a million tokens, and each takes microseconds."""
    firsts = [stamps[0] for stamps in choices if stamps]
    if firsts:
        metrics.ttft.observe((min(firsts) - start_ns) / 1e9)
    for stamps in choices:
        if len(stamps) > 1:
            metrics.tpot.observe((stamps[-1] - stamps[0]) / (len(stamps) - 1) / 1e9)
            for earlier, later in itertools.pairwise(stamps):
                if later > earlier:  # several may come at once
                    metrics.itl.observe((later - earlier) / 1e9)
                    await pace.breathe()


async def _refuse_other(scope: Scope, receive: Receive, send: Send) -> None:
    """Lifespan has nothing to do; a websocket is refused before it opens."""
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1000})


async def _never(scope: Any, receive: Any, send: Any) -> None:
    """Routes are matched by starlette and called by `Application`."""
    raise AssertionError("not called")
