"""The worst that one client may send, beside streams of others: nobody is killed, no token differs, no stream stands still.

The gaps are printed; the bound on them is generous, for a busy machine may add seconds to any of them.
"""

import json
import math
import random
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.running import RunningServer, changed_config, running

VICTIM = {"prompt": "Once upon a time", "max_tokens": 400, "temperature": 0, "ignore_eos": True, "stream": True}
_AT_ONCE = 1000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("worst")
    tiny = {"source": "random:tiny-llama", "sha256": None, "name": "tiny"}
    config = changed_config(folder, model=tiny, engine={"kv_memory_mib": 64}, gateway={"workers": 1})
    with running(config, folder / "server") as server:
        yield server


class Victims:
    """Streams that run one after the other until `stop`: their texts, and the longest wait of all between two events."""

    def __init__(self, server: RunningServer) -> None:
        self.texts: list[str] = []
        self.longest_gap_s = 0.0
        self.problems: list[str] = []
        self._url, self._over = f"{server.url}/v1/completions", threading.Event()
        self._threads = [threading.Thread(target=self._read) for _ in range(2)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """After the stream that runs."""
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _read(self) -> None:
        while True:
            text, last, n_lines = "", math.inf, 0  # its first two tokens wait in the prefill worker's queue, as they should
            try:
                with httpx.stream("POST", self._url, json=VICTIM, timeout=120) as response:
                    for line in response.iter_lines():
                        now = time.monotonic()
                        n_lines += 1
                        self.longest_gap_s, last = max(self.longest_gap_s, now - last), now if n_lines > 4 else math.inf
                        if line.startswith("data: {"):
                            text += json.loads(line[6:])["choices"][0]["text"]
                        elif line == "data: [DONE]":
                            text += "."
            except httpx.HTTPError as error:
                self.problems.append(repr(error))
            self.texts.append(text)
            if self._over.is_set():
                return


def post(server: RunningServer, route: str, body: bytes | dict[str, Any], expected: int) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    with httpx.Client(base_url=server.url, timeout=300) as http:
        response = http.post(route, content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == expected, response.text[:300]


def completion(expected: int, **fields: Any) -> Any:
    return lambda server: post(server, "/v1/completions", fields, expected)


def raw(expected: int, body: bytes, route: str = "/v1/completions") -> Any:
    return lambda server: post(server, route, body, expected)


def together(n: int, request: bytes) -> Any:
    """So many requests on as many connections that are open already."""

    def attack(server: RunningServer) -> None:
        url = httpx.URL(server.url)
        sockets = [socket.create_connection((url.host, url.port), timeout=120) for _ in range(n)]
        for each in sockets:
            each.sendall(request)
        for each in sockets:
            assert each.recv(65536).startswith(b"HTTP/1.1 ")
            each.close()

    return attack


def one_byte_each(n: int) -> Any:
    """Bodies that come byte by byte, all at the same time."""

    def attack(server: RunningServer) -> None:
        url = httpx.URL(server.url)
        sockets = [socket.create_connection((url.host, url.port), timeout=120) for _ in range(n)]
        for each in sockets:
            each.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n")
        for byte in b'{"a": 1} ':
            for each in sockets:
                each.sendall(bytes([byte]))
        for each in sockets:
            assert each.recv(65536).startswith(b"HTTP/1.1 ")
            each.close()

    return attack


def stops() -> list[str]:
    chosen = random.Random(1)
    return ["".join(chosen.choices("abcdefgh", k=256)) for _ in range(16)]


def head(body: bytes) -> bytes:
    return b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


MESSAGE = b'{"role":"user","content":"a"}'
BIG = 8_300_000
WORST = {
    "a string full of quotes": raw(400, b'{"a":' + b"[" * 65 + b'"' + b'\\"' * (BIG // 2)),
    "a prompt of words": raw(400, b'{"prompt":"' + b"word " * (BIG // 5) + b'"}'),
    "a prompt of digits": raw(400, b'{"prompt":"' + b"7" * BIG + b'"}'),
    "many prompts of digits": raw(400, b'{"prompt":[' + b",".join([b'"' + b"7" * 250_000 + b'"'] * 32) + b"]}"),
    "a chat of digits": raw(400, b'{"messages":[{"role":"user","content":"' + b"7" * BIG + b'"}]}', "/v1/chat/completions"),
    "as many ids as may be": raw(400, b'{"prompt":[' + b"5," * (1 << 20) + b"5]}"),
    "too many ids": raw(400, b'{"prompt":[' + b"5," * (BIG // 2) + b"5]}"),
    "too many keys": raw(400, b"{" + b",".join(b'"k%06d":1' % i for i in range(650_000)) + b"}"),
    "as many messages as may be": raw(400, b'{"messages":[' + b",".join([MESSAGE] * 32_000) + b"]}", "/v1/chat/completions"),
    "many long stop strings for many choices": completion(200, prompt="Hi", n=128, temperature=1, max_tokens=2, stop=stops()),
    "usage on every event of many choices": completion(
        200,
        prompt=["a"] * 8,
        n=64,
        max_tokens=6,
        temperature=1,
        ignore_eos=True,
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    ),
    "an evaluation's echo with log probabilities": completion(
        200, prompt=[[5 + i] * 1900 for i in range(24)], echo=True, logprobs=20, max_tokens=1
    ),
    "the same as a stream": completion(200, prompt=[[5 + i] * 1900 for i in range(12)], echo=True, logprobs=20, max_tokens=1, stream=True),
    "many requests at once": together(_AT_ONCE, head(b'{"prompt":"Hi","max_tokens":1}')),
    "many looks at once": together(_AT_ONCE, b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"),
    "many slow bodies at once": one_byte_each(_AT_ONCE),
}


def beside(server: RunningServer, attack: Any) -> Victims:
    victims = Victims(server)
    try:
        attack(server)
    finally:
        victims.stop()
    return victims


def test_the_worst_of_each_kind_stops_nobody(server: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    quiet = beside(server, lambda server: time.sleep(0))
    (text,) = set(quiet.texts)
    assert text.endswith(".")
    pids = server.pids()
    for name, attack in WORST.items():
        start = time.monotonic()
        victims = beside(server, attack)
        with capsys.disabled():
            gap, took = victims.longest_gap_s, time.monotonic() - start
            print(f"\n{name:45} longest gap {gap * 1e3:7.0f} ms, quiet {quiet.longest_gap_s * 1e3:5.0f} ms, took {took:5.1f} s", end="")
        assert victims.problems == [], name
        assert set(victims.texts) == {text}, name
        assert server.pids() == pids, name
        assert victims.longest_gap_s < 20 * quiet.longest_gap_s + 15, name
    with ThreadPoolExecutor(8) as pool:  # and all that is one request together
        victims = beside(server, lambda server: list(pool.map(lambda attack: attack(server), list(WORST.values())[:-3])))
    assert (victims.problems, set(victims.texts), server.pids()) == ([], {text}, pids)
