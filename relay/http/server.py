"""Hypercorn on an inherited listening socket, with what it lacks: HTTP/1.1 only, write timeouts, errors with a body, and bounds.

HTTP/2 is not offered: hypercorn 0.18 buffers without bound for a client that never opens its window. A request to upgrade to it is served
as HTTP/1.1; one that starts with HTTP/2's preface is answered 505. Hypercorn shields its socket writes from cancellation, so the time
limit on a client that takes nothing is set here, where the socket is: it is closed, and the application hears of it as a disconnect.
"""

import os
import re
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import chain
from typing import Any

import h11
import hypercorn.trio.tcp_server as tcp_server
import structlog
import trio
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol import ProtocolWrapper
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState
from hypercorn.utils import wrap_app

from relay.errors import InvalidRequest
from relay.openai.error import error_body

log = structlog.get_logger()

_ORIGIN = re.compile(rb"^https?://[^/?]*", re.IGNORECASE)

App = Callable[[Any, Any, Any], Awaitable[None]]


class Http1Protocol(H11Protocol):
    """HTTP/1.1 and nothing else; what the parser refuses gets a JSON body and an ID like every other error."""

    next_request_id: Callable[[], str]

    async def _check_protocol(self, event: h11.Request) -> None:
        """Hypercorn would switch to HTTP/2 here."""

    async def _create_stream(self, request: h11.Request) -> None:
        """Without websockets: HTTP lets a server ignore an upgrade. A target may also be a whole URL."""
        headers = [(name, value) for name, value in request.headers if name != b"upgrade"]
        target = _ORIGIN.sub(b"", request.target, count=1) or b"/"
        await super()._create_stream(h11.Request(method=request.method, headers=headers, target=target, http_version=request.http_version))

    async def _send_error_response(self, status_code: int) -> None:
        request_id = Http1Protocol.next_request_id()
        what = {431: "the request's headers are too large", 413: "the request is too large"}.get(
            status_code, "the request is not valid HTTP/1.1"
        )
        body = error_body(InvalidRequest(what), request_id)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
            (b"x-request-id", request_id.encode()),
        ]
        response = h11.Response(status_code=status_code, headers=list(chain(headers, self.config.response_headers("h11"))))
        await self._send_h11_event(response)
        await self._send_h11_event(h11.Data(data=body))
        await self._send_h11_event(h11.EndOfMessage())


class _Http1Wrapper(ProtocolWrapper):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.protocol: H11Protocol = Http1Protocol(
            self.app, self.config, self.context, self.task_group, self.state, self.ssl, self.client, self.server, self.send
        )


class Connection(TCPServer):
    """One client connection."""

    write_timeout_s = 60.0
    idle: "dict[Connection, None]"  # of all those of this server, the one that idles longest first

    async def run(self) -> None:
        self.idle[self] = None  # until its first request is there
        try:
            await super().run()
        finally:
            self.idle.pop(self, None)

    async def protocol_send(self, event: Event) -> None:
        if isinstance(event, Updated):
            self.idle.pop(self, None)
            if event.idle:
                self.idle[self] = None
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
    ) -> None:
        self._app, self._max_connections = app, max_connections
        self._n_connections = 0
        self._idle: dict[Connection, None] = {}
        self._config = Config()
        self._config.bind = [f"fd://{listen_fd}"]
        self._config.keep_alive_timeout = keep_alive_s
        self._config.include_server_header = False
        self._config.accesslog = None
        self._config.errorlog = None
        self._config.h11_max_incomplete_size = 32 << 10
        self._context = WorkerContext(None)
        Http1Protocol.next_request_id = next_request_id
        tcp_server.ProtocolWrapper = _Http1Wrapper  # type: ignore[attr-defined]
        self._connection_class = type("Connection", (Connection,), {"write_timeout_s": write_timeout_s, "idle": self._idle})

    async def until_quiet(self) -> None:
        """Return when every connection idles: what was answered is written. Looks now and then, for hypercorn does not tell."""
        while self._n_connections > len(self._idle):
            await trio.sleep(0.01)

    async def run(self) -> None:
        """Serve until cancelled."""
        sockets = self._config.create_sockets()
        listeners = []
        for sock in sockets.insecure_sockets:
            sock.listen(self._config.backlog)
            listeners.append(trio.SocketListener(trio.socket.from_stdlib_socket(sock)))
        handler = partial(self._connection_class, wrap_app(self._app, 0, "asgi"), self._config, self._context, ConnectionState({}))
        async with trio.open_nursery() as connections:
            await trio.serve_listeners(partial(self._serve, handler), listeners, handler_nursery=connections)

    async def _serve(self, handler: Callable[[Any], Any], stream: trio.SocketStream) -> None:
        """One connection's edge: a defect in it must not end the others."""
        self._n_connections += 1
        try:
            if self._n_connections > self._max_connections and self._idle:
                longest = next(iter(self._idle))
                del self._idle[longest]
                await trio.aclose_forcefully(longest.stream)
            await handler(stream).run()
        except* (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        except* Exception as group:
            log.error("a connection failed", exc_info=group)
        finally:
            self._n_connections -= 1
