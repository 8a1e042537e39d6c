"""One request against servers that behave badly on the socket."""

import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import trio
import trustme
from trio.testing import MockClock

from relay.bench.client import Client
from relay.bench.schedule import Planned
from relay.bench.target import parse_target
from relay.bench.wire import Wire
from tests.bench.scripted import STREAM, done, text, whole

PLANNED = Planned(index=0, at_s=0.0, prompt=(), output_tokens=1)

Handler = Callable[[trio.SocketStream], Awaitable[None]]


async def asked(handler: Handler, body: bytes, n: int = 1, *, scheme: str = "http", pause_s: float = 0.0) -> list[tuple[str | None, int]]:
    """Failure and chunks of each of `n` requests, one after the other."""
    found = []
    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(trio.serve_tcp, handler, 0)
        target = parse_target(f"{scheme}://127.0.0.1:{listeners[0].socket.getsockname()[1]}")
        wire = Wire(target)
        nursery.start_soon(wire.run)
        client = Client(wire, target, timeout_s=5.0)
        with trio.fail_after(30):
            for _ in range(n):
                record = await client.ask("/v1/completions", body, PLANNED, trio.current_time(), trio.current_time())
                found.append((record.failure, len(record.chunk_s)))
                await trio.sleep(pause_s)
        nursery.cancel_scope.cancel()
    return found


def test_a_server_that_closes_while_we_send_is_a_cut() -> None:
    async def handler(stream: trio.SocketStream) -> None:
        await stream.receive_some(100)

    assert trio.run(asked, handler, b"x" * (8 << 20)) == [("cut", 0)]


def test_an_answer_that_comes_before_all_was_sent_is_the_answer() -> None:
    """A body over the limit: the server answers, reads no more and closes."""

    async def handler(stream: trio.SocketStream) -> None:
        await stream.receive_some(100)
        await stream.send_all(whole({"error": {"message": "too large"}}, "413 Content Too Large"))
        await stream.send_eof()
        while await stream.receive_some():
            pass

    assert trio.run(asked, handler, b"x" * (8 << 20)) == [("http_413", 0)]


def test_a_connection_whose_body_was_never_read_is_not_used_again() -> None:
    """The server answers and keeps the connection, but reads no further: what we still had to send must not become the next request."""
    connections = 0

    async def handler(stream: trio.SocketStream) -> None:
        nonlocal connections
        connections += 1
        await stream.receive_some(100)
        await stream.send_all(whole({"error": {"message": "too large"}}, "413 Content Too Large"))
        await trio.sleep_forever()

    asking = partial(asked, handler, b"x" * (8 << 20), 2)
    assert trio.run(asking, clock=MockClock(autojump_threshold=0.05)) == [("http_413", 0)] * 2
    assert connections == 2


def test_a_kept_connection_on_which_stray_bytes_come_is_not_used_again() -> None:
    connections = 0

    async def handler(stream: trio.SocketStream) -> None:
        nonlocal connections
        connections += 1
        with suppress(trio.BrokenResourceError):
            while await stream.receive_some():
                await stream.send_all(STREAM + text("a") + done())
                await trio.sleep(0.1)
                await stream.send_all(b"stray")

    async def main() -> list[tuple[str | None, int]]:
        return await asked(handler, b"{}", 2, pause_s=1.0)

    assert trio.run(main, clock=MockClock(autojump_threshold=0.01)) == [(None, 1)] * 2
    assert connections == 2


def test_every_byte_may_come_alone() -> None:
    async def handler(stream: trio.SocketStream) -> None:
        while await stream.receive_some():
            for byte in STREAM + text("a") + text("") + text("b") + done():
                await stream.send_all(bytes([byte]))

    assert trio.run(asked, handler, b"{}", 2) == [(None, 2), (None, 2)]


def test_a_server_that_speaks_no_tls_is_a_failure_to_connect() -> None:
    async def main() -> str | None:
        async with trio.open_nursery() as nursery:

            async def handler(stream: trio.SocketStream) -> None:
                await stream.receive_some()
                await stream.send_all(whole({}))

            listeners = await nursery.start(trio.serve_tcp, handler, 0)
            target = parse_target(f"https://127.0.0.1:{listeners[0].socket.getsockname()[1]}")
            client = Client(Wire(target), target, timeout_s=20.0)
            record = await client.ask("/", b"{}", PLANNED, 0.0, 0.0)
            nursery.cancel_scope.cancel()
        return record.failure

    assert trio.run(main) == "connect"


def test_streams_over_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a certificate of the test's own, in pieces that do not fit the TLS records' bounds; the connection is kept."""
    authority, path = trustme.CA(), tmp_path / "authority.pem"
    authority.cert_pem.write_to_path(str(path))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    monkeypatch.setenv("SSL_CERT_FILE", str(path))
    connections = 0

    async def handler(stream: trio.SocketStream) -> None:
        nonlocal connections
        connections += 1
        tls = trio.SSLStream(stream, context, server_side=True)
        with suppress(trio.BrokenResourceError):
            while await tls.receive_some():
                await tls.send_all(STREAM + text("a" * 50_000))
                await tls.send_all(text("b"))
                await tls.send_all(done())

    assert trio.run(partial(asked, scheme="https"), handler, b"{}", 3) == [(None, 2)] * 3
    assert connections == 1
