"""All sockets of the generator in one epoll and one task: chunks are read in rounds, and only ends wake the tasks of requests.

A trio task for each connection costs some 40 us for every token; a round over all readable sockets some 10, and less the more of them
there are, so that the generator becomes cheaper per token as the load grows.
"""

import os
import select
import socket
import ssl
from contextlib import ExitStack, closing
from typing import Protocol

import trio

from relay.bench.target import Target

_BUFFER = memoryview(bytearray(256 << 10))  # one for all: `recv` would allocate its size anew for every token


Address = tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes]


class Sink(Protocol):
    """Who hears of a connection. Neither call may block; `on_lost` is the last."""

    def on_data(self, data: bytes, now: float) -> None: ...

    def on_lost(self, why: str, now: float) -> None:
        """The other side closed (`why` is empty) or the connection broke."""


class Connection:
    """Made by `Wire.connect`. Without a sink it idles: what it then hears can only be its end."""

    def __init__(self, wire: "Wire", sock: socket.socket) -> None:
        self._wire, self._socket = wire, sock
        self.fd = sock.fileno()
        self.sink: Sink | None = None
        self.used = False
        self.closed = False

    async def send(self, data: bytes) -> None:
        """All of it. Raises OSError, or trio.ClosedResourceError if the other side closes meanwhile."""
        left = memoryview(data)
        while left:
            if self.closed:
                raise trio.ClosedResourceError("the other side closed")
            try:
                left = left[self._socket.send(left) :]
            except (BlockingIOError, ssl.SSLWantWriteError):
                await trio.lowlevel.wait_writable(self._socket)

    def read(self) -> None:
        """What is there, to the sink. The buffer is larger than a TLS record, so that none stays behind where epoll cannot see it."""
        try:
            n = self._socket.recv_into(_BUFFER)
        except (BlockingIOError, ssl.SSLWantReadError):
            return
        except OSError as error:
            self._lost(str(error))
            return
        if n and self.sink is not None:
            self.sink.on_data(bytes(_BUFFER[:n]), trio.current_time())
        else:
            self._lost("")

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._wire.forget(self)
            trio.lowlevel.notify_closing(self._socket)
            self._socket.close()

    def _lost(self, why: str) -> None:
        self.close()
        sink, self.sink = self.sink, None
        if sink is not None:
            sink.on_lost(why, trio.current_time())


class Wire:
    """Connections to one target: opened as needed, kept while idle."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._context = ssl.create_default_context() if target.tls else None
        self._addresses: list[tuple[int, Address]] = []
        self._epoll = select.epoll()
        self._open: dict[int, Connection] = {}
        self._idle: list[Connection] = []

    async def run(self) -> None:
        """Read until cancelled, then close everything."""
        try:
            while True:
                await trio.lowlevel.wait_readable(self._epoll.fileno())
                for fd, _ in self._epoll.poll(0):
                    connection = self._open.get(fd)
                    if connection is not None:
                        connection.read()
        finally:
            for connection in list(self._open.values()):
                connection.close()
            trio.lowlevel.notify_closing(self._epoll.fileno())
            self._epoll.close()

    async def connection(self, *, fresh: bool = False) -> Connection:
        """An idle one, or a new one. Raises OSError."""
        while self._idle and not fresh:
            connection = self._idle.pop()
            if not connection.closed:
                return connection
        sock = await self._connect()
        connection = Connection(self, sock)
        self._open[connection.fd] = connection
        self._epoll.register(connection.fd, select.EPOLLIN)
        return connection

    def release(self, connection: Connection) -> None:
        """Its response is complete and it may be used again."""
        connection.sink = None
        connection.used = True
        if not connection.closed:
            self._idle.append(connection)

    def forget(self, connection: Connection) -> None:
        """It is about to close."""
        self._epoll.unregister(connection.fd)
        del self._open[connection.fd]

    async def _connect(self) -> socket.socket:
        if not self._addresses:
            found = await trio.socket.getaddrinfo(self._target.host, self._target.port, type=socket.SOCK_STREAM)
            self._addresses = [(family, address) for family, _, _, _, address in found]
        problem = OSError("no address")
        for family, address in list(self._addresses):
            try:
                connected = await self._handshakes(family, address)
            except OSError as error:
                problem = error
            else:
                self._addresses = [(family, address)]  # the one that works from now on
                return connected
        raise problem

    async def _handshakes(self, family: int, address: Address) -> socket.socket:
        with ExitStack() as on_failure:
            sock = on_failure.enter_context(closing(socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)))
            try:
                sock.connect(address)
            except BlockingIOError:
                await trio.lowlevel.wait_writable(sock)
            error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                raise OSError(error, os.strerror(error))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._context is not None:
                sock = self._context.wrap_socket(sock, server_hostname=self._target.host, do_handshake_on_connect=False)
                on_failure.enter_context(closing(sock))
                await _shake_hands(sock)
            on_failure.pop_all()
            return sock


async def _shake_hands(sock: ssl.SSLSocket) -> None:
    while True:
        try:
            sock.do_handshake()
        except ssl.SSLWantReadError:
            await trio.lowlevel.wait_readable(sock)
        except ssl.SSLWantWriteError:
            await trio.lowlevel.wait_writable(sock)
        else:
            return
