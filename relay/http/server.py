"""Hypercorn on an inherited listening socket, with what it lacks: HTTP/1.1 only, write timeouts, errors with a body, bounds, and an end.

HTTP/2 is not offered: hypercorn 0.18 buffers without bound for a client that never opens its window. A request to upgrade to it is served
as HTTP/1.1; one that starts with HTTP/2's preface is answered 505. Hypercorn shields its socket writes from cancellation, so the time
limit on a client that takes nothing is set here, where the socket is: it is closed, and the application hears of it as a disconnect.

Each subclass says what it changes. Worth proposing upstream: `Inbound` (the end of a request never waits for its application),
`Connection.run` (the idle timer ends with the reader), `Http1Protocol` (a client that hangs up is noticed behind bytes that it sent ahead),
`_linger` (an answer to half a request is not reset away), 100 Continue when the body is asked for, 400 for a body of
two lengths, reason phrases.
"""

import os
import re
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from itertools import chain
from typing import Any

import h11
import structlog
import trio
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol.events import Body, EndBody, Response
from hypercorn.protocol.events import Event as StreamEvent
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.trio.task_group import TaskGroup
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState
from hypercorn.utils import parse_socket_addr, wrap_app

from relay.errors import InvalidRequest
from relay.http.turns import Turns
from relay.openai.error import error_body

log = structlog.get_logger()

BACKLOG = 1024
_ORIGIN = re.compile(rb"https?://([^/?]*)", re.IGNORECASE)
_BARE_LINE_END = re.compile(rb"(?<!\r)\n")  # which a proxy in front may not take for one (RFC 9112, 2.2 leaves it to us)
_HEAD_BYTES = 32 << 10  # h11 looks at the size of a head only while that is incomplete
_LINGER_S = 30.0
_UNREAD_PARTS = 2  # of a body that its application has yet to read, of 64 KiB at most each
_LINGER_BYTES = 64 << 20
_AHEAD_BYTES = 128 << 10  # behind the request that is being answered
_LAST_REQUESTS_WITHIN_S = 1.0
_TCP_KEEP_ALIVE = ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))

App = Callable[[Any, Any, Any], Awaitable[None]]
Message = MutableMapping[str, Any]


@dataclass(frozen=True)
class Answered(Event):
    """Protocol to connection: the answer is complete and its request is not. What comes is discarded; of the last answer, to the end."""

    is_last: bool


class Inbound:
    """One request's way to its application: `put` by the connection's reader, `take` is the application's `receive`.

    Hypercorn's own is a queue into which the end of the request has to fit as well: with a body that nobody reads it never does, and both
    sides wait for ever. Here the end is the end of the queue.
    """

    def __init__(self, on_wanted: Callable[[], Awaitable[None]]) -> None:
        """`on_wanted` runs before the application waits for a body."""
        self._on_wanted = on_wanted
        self._put, self._take = trio.open_memory_channel[Message](_UNREAD_PARTS)

    async def put(self, message: Message) -> None:
        """Waits while the application has enough to read; what nobody will read is dropped."""
        if message["type"] == "http.disconnect":
            self._put.close()
            return
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            await self._put.send(message)

    async def take(self) -> Message:
        """The next part; once the request is over, that it is, as often as one asks."""
        if not self._take.statistics().current_buffer_used:
            await self._on_wanted()
        try:
            return await self._take.receive()
        except trio.EndOfChannel:
            return {"type": "http.disconnect"}

    def discard(self) -> None:
        """The application has ended: who waits to put more goes on."""
        self._take.close()


class _Tasks(TaskGroup):
    """Hypercorn's, with `Inbound` for its queue. `on_wanted` is set by the connection."""

    on_wanted: Callable[[], Awaitable[None]]

    async def spawn_app(self, app: Any, config: Config, scope: Any, send: Callable[[Any], Awaitable[None]]) -> Any:
        assert self._nursery is not None
        inbound = Inbound(self.on_wanted)
        self._nursery.start_soon(self._run_app, app, scope, inbound, send)
        return inbound.put

    async def _run_app(self, app: Any, scope: Any, inbound: Inbound, send: Callable[[Any], Awaitable[None]]) -> None:
        try:
            await app(scope, inbound.take, send, trio.to_thread.run_sync, trio.from_thread.run)
        except Exception:
            log.exception("an application failed outside its edge")
        finally:
            inbound.discard()
            await send(None)


class Http1Protocol(H11Protocol):
    """HTTP/1.1 and nothing else; what the parser refuses gets a JSON body and an ID like every other error.

    Reading goes on while a request is answered: hypercorn stops where a client has sent something ahead, and hears of no end then. Who
    sends more ahead than is kept gets its first answer, and the connection ends. `is_last`: whether it ends with the answer that begins.
    """

    def __init__(self, *args: Any, next_request_id: Callable[[], str], is_last: Callable[[], bool], turns: Turns) -> None:
        super().__init__(*args)
        self._next_request_id, self._is_last, self._turns = next_request_id, is_last, turns
        self._parsing = trio.Lock()  # by the reader, and where an answer lets the request behind it begin
        self._is_over = False
        self._is_deaf = False  # nothing more on this connection is a request
        self._n_discarded = 0

    async def handle(self, event: Event) -> None:
        if isinstance(event, Closed):
            self._is_over = True
            await self._turns.next()  # a thousand may hang up together
            await self._close_stream()
        elif self._is_deaf and isinstance(event, RawData):
            await self._discard(len(event.data))
        elif isinstance(event, RawData):
            await self._turns.next()
            async with self._parsing:
                if event.data:
                    self._take(event.data)
                else:
                    self.connection.receive_data(b"")
                await self._handle_events()

    def _take(self, data: bytes) -> None:
        """Empty lines before a request are skipped (RFC 9112, 2.2)."""
        if self.connection.their_state is h11.IDLE and not self.connection.trailing_data[0]:
            data = data.lstrip(b"\r\n")
        if data:
            self.connection.receive_data(data)

    async def _go_on(self) -> None:
        """What was sent ahead is next."""
        async with self._parsing:
            await self._handle_events()

    async def ask_for_body(self) -> None:
        """The application wants the body of a client that waits to hear so. Hypercorn says it before anybody has looked at the headers."""
        connection = self.connection
        if connection.they_are_waiting_for_100_continue and connection.our_state is h11.SEND_RESPONSE:
            await self._send_h11_event(h11.InformationalResponse(status_code=100, headers=self.config.response_headers("h11")))

    async def stream_send(self, event: StreamEvent) -> None:
        """With a reason phrase, and with the word that the connection ends where it does."""
        if not isinstance(event, Response) or event.status_code < 200:
            await super().stream_send(event)
            return
        headers = list(chain(event.headers, self.config.response_headers("h11")))
        ends = self._is_last() or self._is_deaf or self.connection.they_are_waiting_for_100_continue
        if ends or self.keep_alive_requests >= self.config.keep_alive_max_requests:
            headers = [(name, value) for name, value in headers if name.lower() != b"connection"]
            headers.append((b"connection", b"close"))
        await self._send_h11_event(h11.Response(headers=headers, status_code=event.status_code, reason=_reason(event.status_code)))

    async def _handle_events(self) -> None:
        while not self._is_over:
            connection, was = self.connection, self.connection.their_state
            if was is h11.IDLE and _BARE_LINE_END.search(connection.trailing_data[0].partition(b"\r\n\r\n")[0]):
                await self._refuse(400)
                return
            try:
                event = connection.next_event()
            except h11.RemoteProtocolError as error:
                if self.stream is not None and was in (h11.DONE, h11.MUST_CLOSE, h11.CLOSED):
                    self._is_deaf = True  # bytes behind the last request: it is answered all the same
                elif connection.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                    await self._refuse(error.error_status_hint)
                else:
                    await self.send(Closed())
                return
            if isinstance(event, h11.Request):
                self._n_discarded = 0
                await self.send(Updated(idle=False))
                if (status := _misframed(event)) is not None:
                    await self._refuse(status)
                    return
                await self._create_stream(event)
            elif event is h11.PAUSED:
                self._is_deaf = len(connection.trailing_data[0]) > _AHEAD_BYTES
                return
            elif isinstance(event, h11.ConnectionClosed) or event is h11.NEED_DATA:
                return
            elif self.stream is not None and isinstance(event, h11.Data | h11.EndOfMessage):
                await self._pass_on(event)
            elif isinstance(event, h11.Data):
                await self._discard(len(event.data))
            elif isinstance(event, h11.EndOfMessage):
                await self._maybe_recycle()

    async def _pass_on(self, event: h11.Data | h11.EndOfMessage) -> None:
        assert self.stream is not None
        await self.stream.handle(Body(1, bytes(event.data)) if isinstance(event, h11.Data) else EndBody(1))

    async def _create_stream(self, request: h11.Request) -> None:
        """Without websockets: HTTP lets a server ignore an upgrade. A target may also be a whole URL."""
        headers = [(name, value) for name, value in request.headers if name != b"upgrade"]
        target = request.target
        if origin := _ORIGIN.match(target):  # its host counts then, not the header's (RFC 9112, 3.2.2)
            headers = [(name, value) for name, value in headers if name != b"host"] + [(b"host", origin[1])]
            target = target[origin.end() :]
            target = target if target.startswith(b"/") else b"/" + target
        await super()._create_stream(h11.Request(method=request.method, headers=headers, target=target, http_version=request.http_version))

    async def _maybe_recycle(self) -> None:
        """Not over what the client still sends: closing a socket over unread bytes resets it, and the answer may be lost with it."""
        if (self.connection.their_state is h11.SEND_BODY or self._is_deaf) and not self._is_over:
            await self._close_stream()
            await self._linger()
            return
        await super()._maybe_recycle()
        ahead, has_ended = self.connection.trailing_data
        if ahead and self.connection.their_state is h11.IDLE and not has_ended:
            self.connection = h11.Connection(h11.SERVER, max_incomplete_event_size=self.config.h11_max_incomplete_size)
            self._take(ahead)
            self.task_group.spawn(self._go_on)

    async def _linger(self) -> None:
        """The answer is complete, its request is not: read on, within limits. It idles meanwhile, and may be closed for others' sake."""
        self._is_deaf = self._is_deaf or self.connection.our_state is not h11.DONE
        await self.send(Answered(self._is_deaf))

    async def _discard(self, n_bytes: int) -> None:
        self._n_discarded += n_bytes
        if self._n_discarded > _LINGER_BYTES:
            await self.send(Closed())

    async def _refuse(self, status_code: int) -> None:
        """Before or instead of the application's answer; nothing that follows on the connection can be trusted."""
        await self._send_error_response(status_code)
        await self._close_stream()
        await self._linger()

    async def _send_error_response(self, status_code: int) -> None:
        request_id = self._next_request_id()
        what = {
            413: "the request is too large",
            417: "the request expects what this server does not do; it knows `Expect: 100-continue`",
            431: "the request's headers are too large",
        }.get(status_code, "the request is not valid HTTP/1.1")
        body = error_body(InvalidRequest(what), request_id)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
            (b"x-request-id", request_id.encode()),
        ]
        headers += self.config.response_headers("h11")
        await self._send_h11_event(h11.Response(status_code=status_code, headers=headers, reason=_reason(status_code)))
        await self._send_h11_event(h11.Data(data=body))
        await self._send_h11_event(h11.EndOfMessage())


def _misframed(request: h11.Request) -> int | None:
    """The status that refuses a request whose body two readers might end at different bytes, or that expects the unknown."""
    headers = dict(request.headers)
    if sum(len(name) + len(value) for name, value in request.headers) + len(request.target) > _HEAD_BYTES:
        return 431
    if b"transfer-encoding" in headers and (b"content-length" in headers or request.http_version < b"1.1"):
        return 400
    if headers.get(b"expect", b"100-continue").lower() != b"100-continue":
        return 417
    return None


def _reason(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return ""


class Connection(TCPServer):
    """One client connection. What its server tells it is in the class attributes of a subclass."""

    write_timeout_s = 60.0
    next_request_id: Callable[[], str]
    is_last: Callable[[], bool]
    turns: Turns
    idle: "dict[Connection, None]"  # of all those of this server, the one that idles longest first

    async def run(self) -> None:
        """Hypercorn's, but for the idle timer: once the client has closed its end it is not waited for."""
        sock = self.stream.socket
        self.idle[self] = None  # until its first request is there
        try:
            client, server = parse_socket_addr(sock.family, sock.getpeername()), parse_socket_addr(sock.family, sock.getsockname())
            async with (tasks := _Tasks()):
                self._task_group = tasks
                protocol = Http1Protocol(
                    self.app,
                    self.config,
                    self.context,
                    tasks,
                    ConnectionState(self.state),
                    False,
                    client,
                    server,
                    self.protocol_send,
                    next_request_id=self.next_request_id,
                    is_last=self.is_last,
                    turns=self.turns,
                )
                self.protocol = protocol  # type: ignore[assignment]  # without the wrapper that would change to HTTP/2
                tasks.on_wanted = protocol.ask_for_body
                await self.protocol.initiate()
                await self.idle_task.restart(tasks, self._idle_timeout)
                await self._read_data()
                await self.idle_task.stop()
        except OSError:
            pass
        finally:
            self.idle.pop(self, None)
            await self._close()

    async def protocol_send(self, event: Event) -> None:
        if isinstance(event, Updated):
            self.idle.pop(self, None)
            if event.idle:
                self.idle[self] = None
        if isinstance(event, Answered):
            await self._outlast(event)
            return
        if not isinstance(event, RawData):
            await super().protocol_send(event)
            return
        try:
            data = event.data if self.send_lock.locked() else self._taken_at_once(event.data)
            if not data:
                return
            async with self.send_lock:
                with trio.move_on_after(self.write_timeout_s, shield=True):
                    await self.stream.send_all(data)
                    return
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        await trio.aclose_forcefully(self.stream)
        await self.protocol.handle(Closed())

    async def _outlast(self, answer: Answered) -> None:
        """Let the client finish what it sends, for a while; meanwhile others may have its place."""
        if answer.is_last:
            with suppress(OSError, trio.BrokenResourceError, trio.ClosedResourceError):
                async with self.send_lock:
                    await self.stream.send_eof()
        self.idle.pop(self, None)
        self.idle[self] = None
        await self.idle_task.restart(self._task_group, self._linger_timeout)

    async def _linger_timeout(self) -> None:
        await trio.sleep(min(_LINGER_S, self.config.keep_alive_timeout))
        with trio.CancelScope(shield=True):
            await self._initiate_server_close()

    def _taken_at_once(self, data: bytes) -> bytes:
        """Write what the socket takes without waiting, a token's event nearly always whole; returns the rest. Raises OSError."""
        try:
            n = os.write(self.stream.socket.fileno(), data)
        except BlockingIOError:
            n = 0
        return data[n:]


class HttpServer:
    """Serves one app on one listening socket until told to drain."""

    def __init__(
        self,
        app: App,
        listen_fd: int,
        *,
        max_connections: int,
        keep_alive_s: float,
        write_timeout_s: float,
        next_request_id: Callable[[], str],
        turns: Turns,
    ) -> None:
        self._app, self._max_connections = app, max_connections
        self.n_connections = 0
        self._idle: dict[Connection, None] = {}
        self._accepting = trio.CancelScope()
        self.draining = False  # each answer is the last of its connection
        self._config = Config()
        self._config.bind = [f"fd://{listen_fd}"]
        self._config.keep_alive_timeout = keep_alive_s
        self._config.include_server_header = False
        self._config.accesslog = None
        self._config.errorlog = None
        self._config.h11_max_incomplete_size = _HEAD_BYTES
        self._context = WorkerContext(None)
        known: dict[str, Any] = {
            "write_timeout_s": write_timeout_s,
            "next_request_id": staticmethod(next_request_id),
            "is_last": staticmethod(lambda: self.draining),
            "turns": turns,
            "idle": self._idle,
        }
        self._connection_class = type("Connection", (Connection,), known)

    def stop_accepting(self) -> None:
        """New connections wait in the listening socket, which others hold as well, for another gateway or for the next life of this one."""
        self._accepting.cancel()
        self.draining = True

    async def until_unused(self) -> None:
        """Once it has stopped accepting: return when every connection has ended. One that is in use ends with its next answer; one that
        idles has a moment for the request that may be on its way, and is closed."""
        with trio.move_on_after(_LAST_REQUESTS_WITHIN_S):
            while self.n_connections:
                await trio.sleep(0.01)
        while self.n_connections:
            for connection in tuple(self._idle):
                await trio.aclose_forcefully(connection.stream)
            await trio.sleep(0.01)

    async def until_quiet(self) -> None:
        """Return when every connection idles: what was answered is written. Looks now and then, for hypercorn does not tell."""
        while self.n_connections > len(self._idle):
            await trio.sleep(0.01)

    async def run(self) -> None:
        """Serve until cancelled."""
        sockets = self._config.create_sockets()
        listeners = []
        for sock in sockets.insecure_sockets:
            sock.listen(BACKLOG)
            listeners.append(trio.SocketListener(trio.socket.from_stdlib_socket(sock)))
        handler = partial(self._connection_class, wrap_app(self._app, 0, "asgi"), self._config, self._context, ConnectionState({}))
        async with trio.open_nursery() as connections:
            with self._accepting:
                await trio.serve_listeners(partial(self._serve, handler), listeners, handler_nursery=connections)

    async def _serve(self, handler: Callable[[Any], Any], stream: trio.SocketStream) -> None:
        """One connection's edge: a defect in it must not end the others."""
        self.n_connections += 1
        try:
            self._watch_over(stream)
            if self.n_connections > self._max_connections and self._idle:
                longest = next(iter(self._idle))
                del self._idle[longest]
                await trio.aclose_forcefully(longest.stream)
            await handler(stream).run()
        except* (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        except* Exception as group:
            log.error("a connection failed", exc_info=group)
        finally:
            self.n_connections -= 1

    def _watch_over(self, stream: trio.SocketStream) -> None:
        """A client that is gone without a word is found out by the kernel, within a minute."""
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _TCP_KEEP_ALIVE:
            stream.setsockopt(socket.IPPROTO_TCP, option, value)
