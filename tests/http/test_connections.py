"""Connections end when their clients do, and answers arrive whatever was sent around their requests; on `HttpServer` and real sockets."""

import itertools
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio

from relay.http.server import HttpServer
from relay.http.turns import Turns

HANGS_S = 60  # what takes so long never ends
OK = b"HTTP/1.1 200 OK\r\n"

App = Callable[[Any, Any, Any], Awaitable[None]]


async def answer(send: Any, body: bytes = b"{}", *headers: tuple[bytes, bytes]) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body)), *headers]})
    await send({"type": "http.response.body", "body": body})


async def read_nothing(scope: Any, receive: Any, send: Any) -> None:
    """As GET /metrics, which asks all workers before it answers, and reads no body."""
    await trio.sleep(0.05)
    await answer(send)


async def read_all(scope: Any, receive: Any, send: Any) -> None:
    size, more = 0, True
    while more:
        message = await receive()
        size, more = size + len(message.get("body", b"")), message.get("more_body", False)
    await answer(send, b"%d" % size)


class Listening:
    """A listening socket with servers on it; `dial` makes clients."""

    def __init__(self) -> None:
        self._sock = socket.socket()
        self._sock.bind(("127.0.0.1", 0))
        self._sock.listen(100)
        self._ids = itertools.count()
        self.port: int = self._sock.getsockname()[1]

    def server(self, app: App, keep_alive_s: float = HANGS_S * 10) -> HttpServer:
        def next_id() -> str:
            return f"x{next(self._ids)}"

        fd = self._sock.dup().detach()
        return HttpServer(
            app, fd, max_connections=1000, keep_alive_s=keep_alive_s, write_timeout_s=5, next_request_id=next_id, turns=Turns()
        )

    async def dial(self) -> trio.SocketStream:
        return await trio.open_tcp_stream("127.0.0.1", self.port)

    def close(self) -> None:
        self._sock.close()


@asynccontextmanager
async def serving(app: App) -> AsyncIterator[tuple[Listening, HttpServer]]:
    listening = Listening()
    server = listening.server(app)
    with trio.fail_after(HANGS_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.run)
            yield listening, server
            nursery.cancel_scope.cancel()
    listening.close()


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await trio.sleep(0.01)


async def one_answer(stream: trio.SocketStream) -> bytes:
    """Head and body of the next answer, by its Content-Length."""
    data = b""
    while b"\r\n\r\n" not in data:
        part = await stream.receive_some()
        assert part, data
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)content-length: (\d+)", head)
    while length is not None and len(body) < int(length[1]):
        body += await stream.receive_some()
    return head + b"\r\n\r\n" + body


async def to_the_end(stream: trio.SocketStream) -> bytes:
    return b"".join([part async for part in stream])


def request(method: str = "GET", *headers: str, body: bytes = b"") -> bytes:
    return "\r\n".join((f"{method} / HTTP/1.1", "Host: x", *headers, "", "")).encode() + body


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    trio.run(scenario)


def test_a_body_that_nobody_reads_does_not_hold_its_connection() -> None:
    """With hypercorn's own queue both sides wait for ever."""

    async def scenario() -> None:
        async with serving(read_nothing) as (listening, server):
            for _ in range(5):
                async with await listening.dial() as stream:
                    await stream.send_all(request("GET", "Content-Length: 3000000", body=b"x" * 3_000_000))
                    assert (await one_answer(stream)).startswith(OK)
            await until(lambda: server.n_connections == 0)

    run(scenario)


def test_a_client_that_has_gone_in_the_middle_of_an_unread_body_leaves_no_connection() -> None:
    async def scenario() -> None:
        async with serving(read_nothing) as (listening, server):
            for _ in range(5):
                async with await listening.dial() as stream:
                    await stream.send_all(request("GET", "Content-Length: 3000000", body=b"x" * 1_000_000))
            await until(lambda: server.n_connections == 0)

    run(scenario)


def test_a_connection_that_its_client_has_closed_does_not_wait_for_the_idle_timer() -> None:
    """In hypercorn it stays in CLOSE_WAIT for all of keep_alive_s."""

    async def scenario() -> None:
        async with serving(read_all) as (listening, server):
            for sends in (b"", request(), request("POST", "Content-Length: 2", body=b"ab")):
                async with await listening.dial() as stream:
                    if sends:
                        await stream.send_all(sends)
                        await one_answer(stream)
            await until(lambda: server.n_connections == 0)

    run(scenario)


@pytest.mark.parametrize("behind", [b"\r\n", request(), b"x" * 1_000_000])
def test_a_client_that_hangs_up_is_noticed_behind_what_it_sent_ahead(behind: bytes) -> None:
    async def scenario() -> None:
        began, heard = trio.Event(), trio.Event()

        async def wait_for_the_end(scope: Any, receive: Any, send: Any) -> None:
            began.set()
            while (await receive())["type"] != "http.disconnect":
                pass
            heard.set()

        async with serving(wait_for_the_end) as (listening, server):
            stream = await listening.dial()
            await stream.send_all(request())
            await began.wait()
            async with trio.open_nursery() as nursery:

                async def send_ahead() -> None:
                    with trio.move_on_after(1):
                        await stream.send_all(behind)
                    await stream.aclose()

                nursery.start_soon(send_ahead)
                await heard.wait()
            await until(lambda: server.n_connections == 0)

    run(scenario)


@pytest.mark.parametrize("n_bytes", [100_000, 4_000_000])
def test_an_answer_that_comes_before_the_body_is_read_arrives_and_the_connection_goes_on(n_bytes: int) -> None:
    """A socket that is closed over unread bytes is reset: the client saw a broken pipe, and never the answer."""

    async def at_once(scope: Any, receive: Any, send: Any) -> None:
        await answer(send, scope["method"].encode())

    async def scenario() -> None:
        async with serving(at_once) as (listening, _), await listening.dial() as stream:
            for _ in range(3):
                await stream.send_all(request("POST", f"Content-Length: {n_bytes}", body=b"x" * n_bytes))
                assert (await one_answer(stream)).endswith(b"POST")
            await stream.send_all(request())
            assert (await one_answer(stream)).endswith(b"GET")

    run(scenario)


def test_an_answer_that_ends_the_connection_arrives_though_the_body_goes_on() -> None:
    async def refuse(scope: Any, receive: Any, send: Any) -> None:
        await answer(send, b"too large", (b"connection", b"close"))

    async def scenario() -> None:
        async with serving(refuse) as (listening, server):
            async with await listening.dial() as stream:
                await stream.send_all(request("POST", "Content-Length: 40000000", body=b"x" * 4_000_000))
                assert (await to_the_end(stream)).endswith(b"too large")
            await until(lambda: server.n_connections == 0)

    run(scenario)


def test_bytes_behind_a_last_request_do_not_refuse_it() -> None:
    async def scenario() -> None:
        async with serving(read_nothing) as (listening, _), await listening.dial() as stream:
            await stream.send_all(request("POST", "Connection: close", "Content-Length: 2", body=b"ab\r\n"))
            found = await to_the_end(stream)
            assert found.startswith(OK)
            assert found.endswith(b"{}")

    run(scenario)


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        (("Content-Length: 5", "Transfer-Encoding: chunked"), b"0\r\n\r\n", b"400 Bad Request"),  # RFC 9112, 6.3: request smuggling
        (("Transfer-Encoding: chunked", "Content-Length: 5"), b"0\r\n\r\n", b"400 Bad Request"),
        (("Content-Length: 2", "Expect: 200-maybe"), b"ab", b"417 Expectation Failed"),
    ],
)
def test_a_request_that_could_be_read_in_two_ways_is_refused_and_its_connection_ends(
    headers: tuple[str, ...], body: bytes, status: bytes
) -> None:
    async def scenario() -> None:
        async with serving(read_all) as (listening, server):
            async with await listening.dial() as stream:
                await stream.send_all(request("POST", *headers, body=body) + request())
                found = await to_the_end(stream)
                assert found.startswith(b"HTTP/1.1 " + status)
                assert found.count(b"HTTP/1.1 ") == 1
            await until(lambda: server.n_connections == 0)

    run(scenario)


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\nHost: x\n\n",
        b"GET / HTTP/1.1\r\nHost: x\nX-Hidden: y\r\n\r\n",
        b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    ],
)
def test_what_a_proxy_could_read_in_another_way_is_refused(data: bytes) -> None:
    async def scenario() -> None:
        async with serving(read_all) as (listening, _), await listening.dial() as stream:
            await stream.send_all(data + request())
            found = await to_the_end(stream)
            assert found.startswith(b"HTTP/1.1 400 Bad Request")
            assert found.count(b"HTTP/1.1 ") == 1

    run(scenario)


def test_empty_lines_before_a_request_are_skipped() -> None:
    """And what was sent ahead behind such a line is served in its turn."""

    async def scenario() -> None:
        async with serving(read_all) as (listening, _), await listening.dial() as stream:
            await stream.send_all((b"\r\n" + request("POST", "Content-Length: 2", body=b"ab")) * 3 + b"\r\n")
            found = b""
            while found.count(OK) < 3:
                part = await stream.receive_some()
                assert part, found
                found += part
            await stream.send_all(request())
            assert (await one_answer(stream)).endswith(b"0")

    run(scenario)


@pytest.mark.parametrize("target", [b"http://other:99/", b"HTTPS://other:99/?a=b", b"http://other:99", b"http://other:99?a=b"])
def test_the_host_of_a_whole_url_counts(target: bytes) -> None:
    async def hosts(scope: Any, receive: Any, send: Any) -> None:
        await answer(send, scope["path"].encode() + b" " + b",".join(value for name, value in scope["headers"] if name == b"host"))

    async def scenario() -> None:
        async with serving(hosts) as (listening, _), await listening.dial() as stream:
            await stream.send_all(b"GET " + target + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert (await one_answer(stream)).endswith(b"/ other:99")

    run(scenario)


def test_a_client_is_told_to_go_on_once_its_body_is_wanted_and_only_then() -> None:
    async def scenario() -> None:
        async with serving(read_all) as (listening, _), await listening.dial() as stream:
            await stream.send_all(request("POST", "Content-Length: 2", "Expect: 100-continue"))
            assert (await one_answer(stream)).startswith(b"HTTP/1.1 100")
            await stream.send_all(b"ab")
            assert (await one_answer(stream)).endswith(b"2")
        async with serving(read_nothing) as (listening, server):
            async with await listening.dial() as stream:
                await stream.send_all(request("POST", "Content-Length: 9999999999", "Expect: 100-continue"))
                found = await to_the_end(stream)
                assert found.startswith(OK)
                assert b"connection: close" in found
            await until(lambda: server.n_connections == 0)

    run(scenario)


def test_many_clients_at_once_wait_for_a_busy_server() -> None:
    """Hypercorn listens again, with room for a hundred."""

    async def scenario() -> None:
        async with serving(read_nothing) as (listening, _):
            async with await listening.dial() as stream:  # it listens by now
                await stream.send_all(request())
                await one_answer(stream)
            clients = []
            for _ in range(300):  # without an await: the server stands still
                clients.append(client := socket.socket())
                client.settimeout(HANGS_S)
                client.connect(("127.0.0.1", listening.port))
            for client in clients:
                client.close()

    run(scenario)


def test_a_server_that_stops_accepting_leaves_new_connections_to_another_and_ends_its_own() -> None:
    async def scenario() -> None:
        go_on = trio.Event()

        def named(name: bytes) -> App:
            async def app(scope: Any, receive: Any, send: Any) -> None:
                if scope["path"] == "/slow":
                    await go_on.wait()
                await answer(send, name)

            return app

        listening = Listening()
        old, new = listening.server(named(b"old")), listening.server(named(b"new"))
        with trio.fail_after(HANGS_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(old.run)
                used, idle, slow = [await listening.dial() for _ in range(3)]
                for stream in (used, idle):
                    await stream.send_all(request())
                    assert (await one_answer(stream)).endswith(b"old")
                await slow.send_all(request().replace(b"GET /", b"GET /slow"))
                await until(lambda: old.n_connections == 3)
                old.stop_accepting()
                waiting = await listening.dial()  # in nobody's hands
                await waiting.send_all(request())
                nursery.start_soon(new.run)
                assert (await one_answer(waiting)).endswith(b"new")
                await used.send_all(request())
                last = await to_the_end(used)
                assert last.endswith(b"old")
                assert b"connection: close" in last
                nursery.start_soon(old.until_unused)
                assert await to_the_end(idle) == b""
                go_on.set()
                assert (await to_the_end(slow)).endswith(b"old")
                await until(lambda: old.n_connections == 0)
                for stream in (used, idle, slow, waiting):
                    await stream.aclose()
                nursery.cancel_scope.cancel()
        listening.close()

    run(scenario)


@pytest.mark.parametrize("in_pieces", [False, True])
def test_a_head_that_is_too_large_is_refused_however_it_comes(in_pieces: bool) -> None:
    """The parser looks at its size only while it is incomplete."""

    async def scenario() -> None:
        async with serving(read_all) as (listening, server):
            async with await listening.dial() as stream:
                head = request("GET", *(f"X-{i}: {'x' * 60}" for i in range(700)))
                for start in range(0, len(head), 8192 if in_pieces else len(head)):
                    await stream.send_all(head[start : start + (8192 if in_pieces else len(head))])
                    await trio.lowlevel.checkpoint()
                assert (await to_the_end(stream)).startswith(b"HTTP/1.1 431 Request Header Fields Too Large")
            await until(lambda: server.n_connections == 0)

    run(scenario)


def test_a_client_that_never_sends_the_body_of_an_answered_request_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relay.http.server._LINGER_S", 0.1)

    async def scenario() -> None:
        async with serving(read_nothing) as (listening, server), await listening.dial() as stream:
            await stream.send_all(request("POST", "Content-Length: 100", body=b"a"))
            assert (await one_answer(stream)).startswith(OK)
            assert await to_the_end(stream) == b""
            await until(lambda: server.n_connections == 0)

    run(scenario)
