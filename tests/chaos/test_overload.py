"""Clients that hold on to connections, read nothing, or come in numbers: the others are served, and nothing is kept for ever."""

import concurrent.futures
import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.running import RunningServer, changed_config, running, until


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Iterator[RunningServer]:
    gateway, router = {"max_connections": 64, "write_timeout_s": 1.0}, {"max_queue": 4, "queue_timeout_s": 60}
    folder = tmp_path_factory.mktemp("config")
    config = changed_config(folder, gateway=gateway, router=router, engine={"max_running": 4})
    with running(config, tmp_path_factory.mktemp("overload")) as server:
        yield server


@pytest.fixture(autouse=True)
def _laws(server: RunningServer) -> Iterator[None]:
    yield
    server.assert_blocks_come_back()


def connect(server: RunningServer, **body: Any) -> socket.socket:
    """A connection, with a request on it if there is a body, that takes as little as can be."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    sock.connect((urlsplit(server.url).hostname, urlsplit(server.url).port))
    if body:
        data = json.dumps(body).encode()
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
    return sock


def ask(server: RunningServer, max_tokens: int = 8, timeout: float = 60.0) -> httpx.Response:
    body = {"prompt": "Bread is", "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=timeout)


def test_a_thousand_idle_connections_do_not_stop_service(server: RunningServer) -> None:
    with ExitStack() as stack:
        idle = [stack.enter_context(connect(server)) for _ in range(500)]
        for half in (b"", b"POST /v1/completions HTTP/1.1\r\nHo"):  # idle from the start, or in the midst of its headers
            idle += [stack.enter_context(connect(server)) for _ in range(250)]
            for sock in idle[-250:]:
                sock.sendall(half)
        assert ask(server).status_code == 200
        idle[0].settimeout(10)
        assert idle[0].recv(1) == b"", "the one that idled longest was closed"
        idle[-1].settimeout(0.2)
        with pytest.raises(TimeoutError):
            idle[-1].recv(1)


def test_a_connection_with_a_request_on_it_is_not_idle(server: RunningServer) -> None:
    with ExitStack() as stack, concurrent.futures.ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, server, 200)
        until(lambda: sum(pool["running"] for pool in server.kv().values()) > 0, 120)
        for _ in range(200):
            stack.enter_context(connect(server))
        assert answer.result().json()["usage"]["completion_tokens"] == 200


def test_who_reads_nothing_slows_nobody_and_is_cancelled(server: RunningServer) -> None:
    body = {"prompt": "Bread is", "max_tokens": 3000, "temperature": 0, "ignore_eos": True, "stream": True, "logprobs": 20, "n": 2}
    with ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(connect(server, **body))
        until(lambda: sum(pool["running"] for pool in server.kv().values()) > 0, 120)
        assert ask(server).status_code == 200
        until(lambda: sum(pool["running"] for pool in server.kv().values()) == 0, 60, server.kv)


def test_beyond_the_queue_requests_are_refused_with_a_time_to_come_back(server: RunningServer) -> None:
    with concurrent.futures.ThreadPoolExecutor(40) as pool:
        answers = list(pool.map(lambda _: ask(server, 60), range(40)))
    codes = [answer.status_code for answer in answers]
    assert set(codes) == {200, 503}
    assert codes.count(200) >= 8
    for answer in answers:
        if answer.status_code == 503:
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.json()["error"]["code"] == "overloaded"
    assert ask(server).status_code == 200
