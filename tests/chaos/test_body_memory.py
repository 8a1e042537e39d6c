"""Bodies under way: what a gateway holds of them is bounded, shown, and given back when their clients have gone."""

import re
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.running import RunningServer, changed_config, running, until

MIB = 1 << 20
BODY = {"prompt": "Once upon a time", "max_tokens": 2, "temperature": 0}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningServer]:
    tiny = {"source": "random:tiny-llama", "sha256": None, "name": "tiny"}
    (tmp_path / "config").mkdir()
    gateway = {"max_bodies_mib": 40, "max_body_mib": 4}
    with running(
        changed_config(tmp_path / "config", model=tiny, gateway=gateway, engine={"kv_memory_mib": 16}), tmp_path / "server"
    ) as server:
        yield server


def gauge(server: RunningServer, name: str) -> float:
    found = re.search(rf"^{name}{{[^}}]*}} (\S+)$", server.http.get("/metrics").text, re.MULTILINE)
    assert found, name
    return float(found[1])


def anonymous_mib(pid: int) -> float:
    found = re.search(r"^RssAnon:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found
    return int(found[1]) / 1024


def one_byte_short(server: RunningServer, n_bytes: int) -> socket.socket:
    parts = urlsplit(server.url)
    sock = socket.create_connection((parts.hostname, parts.port), timeout=300)
    sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % n_bytes + b" " * (n_bytes - 1))
    return sock


def test_bodies_are_held_within_a_bound_and_given_back(server: RunningServer) -> None:
    pid = server.pids()["gateway-0"]
    before = anonymous_mib(pid)
    for _ in range(3):
        clients = [one_byte_short(server, 3 * MIB) for _ in range(13)]
        until(lambda: gauge(server, "relay_body_bytes") == 13 * (3 * MIB - 1), 120, lambda: gauge(server, "relay_body_bytes"))
        refused = gauge(server, "relay_bodies_refused")
        answer = server.http.post("/v1/completions", content=b" " * (2 * MIB), headers={"Content-Type": "application/json"})
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
        assert gauge(server, "relay_bodies_refused") == refused + 1
        assert server.http.post("/v1/completions", json=BODY).status_code == 200  # there is room for a small one
        for client in clients:
            client.close()
        until(lambda: gauge(server, "relay_body_bytes") == 0, 120, lambda: gauge(server, "relay_body_bytes"))
    assert gauge(server, "relay_body_bytes_limit") == 40 * MIB
    until(lambda: anonymous_mib(pid) < before + 60, 120, lambda: (before, anonymous_mib(pid)))


def test_a_body_that_is_understood_or_refused_is_held_no_longer(server: RunningServer) -> None:
    for body in (b"{", b'{"prompt": "a", "max_tokens": 1}', b'{"prompt": ""}', b"x" * (5 * MIB)):
        server.http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert gauge(server, "relay_body_bytes") == 0
