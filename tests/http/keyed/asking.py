"""Requests with keys to a server of two gateway workers, each on a connection of its own, so that both take part."""

import json
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import httpx

from relay.auth.keys import hash_of
from tests.running import RunningServer, until

ORIGIN = "https://page.example"
FRESH = httpx.Client(limits=httpx.Limits(max_keepalive_connections=0), timeout=300)  # a connection for each request, TLS set up once
OPEN = ("GET /healthz", "GET /readyz", "GET /health", "GET /ping")
KEYS: dict[str, dict[str, Any]] = {
    "root": {"scopes": ["admin"]},
    "alice": {},
    "bob": {},
    "scraper": {"scopes": ["metrics"]},
    "narrow": {"models": ["other"]},
    "old": {"expires": "2020-01-01"},
    "ten": {"rpm": 10},
    "tokens": {"tpm": 100},
    "two": {"concurrency": 2},
    "leaver": {"concurrency": 1, "tpm": 100000},
    "returner": {"concurrency": 1, "tpm": 100000},
    "urgent": {"best_priority": -5},
    "four": {"rpm": 4, "tpm": 100000, "concurrency": 9},
}


def key(name: str) -> str:
    return f"sk-test-{name}-of-this-test"


def entry(name: str, more: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "sha256": hash_of(key(name).encode()), **more}


def send(server: RunningServer, name: str | None, method: str, path: str, **more: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key(name)}"} if name else {}
    return FRESH.request(method, f"{server.url}{path}", headers={**headers, **more.pop("headers", {})}, **more)


def generate(server: RunningServer, name: str | None, **more: Any) -> httpx.Response:
    headers = more.pop("headers", {})
    body = {"prompt": "Once upon a time", "max_tokens": 1, "temperature": 0, "ignore_eos": True, **more}
    return send(server, name, "POST", "/v1/completions", json=body, headers=headers)


def at_once(n: int, server: RunningServer, name: str, **more: Any) -> list[httpx.Response]:
    with ThreadPoolExecutor(n) as pool:
        return list(pool.map(lambda _: generate(server, name, **more), range(n)))


def life(response: httpx.Response) -> str:
    """Of the gateway that answered."""
    return response.headers["x-request-id"].partition("-")[0]


def gateways(server: RunningServer) -> dict[str, httpx.Response]:
    """An answer of each gateway that takes connections at the moment."""
    return {life(response): response for response in (send(server, None, "GET", "/healthz") for _ in range(12))}


def on_each(server: RunningServer, path: str, name: str = "root") -> list[httpx.Response]:
    """The answers of both gateways to one question."""
    found: dict[str, httpx.Response] = {}

    def ask() -> bool:
        response = send(server, name, "GET", path)
        found[life(response)] = response
        return len(found) == 2

    until(ask, 120)
    return list(found.values())


class Held:
    """A long stream that has begun."""

    def __init__(self, server: RunningServer, name: str) -> None:
        parts = urlsplit(server.url)
        body = json.dumps({"prompt": "A story", "max_tokens": 2000, "stream": True, "ignore_eos": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key(name)}\r\nContent-Length: {len(body)}\r\n\r\n"
        self.socket = socket.create_connection((parts.hostname, parts.port), timeout=300)
        self.socket.sendall(head.encode() + body)
        self.head = b""
        while b"data: " not in self.head:
            part = self.socket.recv(65536)
            assert part, self.head
            self.head += part
            assert self.head.startswith(b"HTTP/1.1 200"), self.head

    @property
    def life(self) -> str:
        found = re.search(rb"x-request-id: (\w+)-", self.head)
        assert found is not None
        return found[1].decode()
