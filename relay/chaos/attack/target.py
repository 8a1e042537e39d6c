"""What attackers aim at, and the raw sockets that they use: a client library would refuse to send most of this."""

import http.client
import json
import random
import socket
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

_ANSWER_WITHIN_S = 30.0
_MOST_ANSWER = 64 << 20


class Broken(Exception):
    """The server did what it must not. The text says what was sent and what came."""


@dataclass(frozen=True)
class Target:
    """One server. tokens_per_s: of prompts, measured while nothing else ran, by which attacks are sized. poison_token: what kills a worker
    that computes it, if any does. over: set when the attack is to end."""

    url: str
    max_context: int
    tokens_per_s: float
    poison_token: int | None
    over: threading.Event
    open: weakref.WeakSet[socket.socket] = field(default_factory=weakref.WeakSet)

    def connect(self) -> socket.socket:
        """Raises OSError."""
        parts = urlsplit(self.url)
        sock = socket.create_connection((parts.hostname, parts.port), timeout=_ANSWER_WITHIN_S)
        self.open.add(sock)
        return sock

    def hang_up(self) -> None:
        """Leave everything that is still under way."""
        for sock in list(self.open):
            with suppress(OSError):  # closed already
                sock.shutdown(socket.SHUT_RDWR)

    def send(self, data: bytes) -> bytes:
        """All that came until the server closed: empty if it closed or reset without a word. Raises TimeoutError if it says nothing, and
        another OSError if the attack has ended meanwhile: the answer may be half of one."""
        with self.connect() as sock:
            with suppress(ConnectionError):  # it has closed, perhaps behind an answer
                sock.sendall(data)
            answer = read_to_end(sock)
        if self.over.is_set():
            raise ConnectionAbortedError("the attack is over")
        return answer

    def post(self, path: str, body: Any, *headers: str) -> tuple[int, dict[str, Any]]:
        """Status, and the answer if it is JSON. Raises OSError if the connection breaks."""
        answer = self.send(request("POST", path, json.dumps(body).encode(), *headers))
        if not answer:
            raise ConnectionResetError("closed without an answer")
        try:
            parsed = json.loads(answer.partition(b"\r\n\r\n")[2])
        except ValueError:
            parsed = {}
        return status(answer), parsed if isinstance(parsed, dict) else {}

    def rest(self, seconds: float) -> None:
        """Hold on to what is open; less long if the attack ends."""
        self.over.wait(seconds)

    def unpoisoned(self, **fields: Any) -> dict[str, Any]:
        """A generation's fields, which will not come upon the poison by itself."""
        bias = {} if self.poison_token is None else {"logit_bias": {str(self.poison_token): -100}}
        return {"temperature": 0, **bias, **fields}


Attack = Callable[[Target, random.Random], None]  # one round; raises Broken, or OSError where the server hangs up


def request(method: str, path: str, body: bytes = b"", *headers: str) -> bytes:
    """One that asks for the connection to be closed. HTTP/1.1's chunks are not asked for, so that an answer is read to its end."""
    lines = [f"{method} {path} HTTP/1.0", "Host: 127.0.0.1", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def read_to_end(sock: socket.socket) -> bytes:
    parts, size = [], 0
    while size < _MOST_ANSWER:
        try:
            part = sock.recv(1 << 16)
        except ConnectionError:
            break
        if not part:
            break
        parts.append(part)
        size += len(part)
    return b"".join(parts)


def status(answer: bytes) -> int:
    """Raises http.client.BadStatusLine."""
    words = answer[:64].split(b" ")
    if not answer.startswith(b"HTTP/1.") or len(words) < 2 or not words[1][:3].isdigit():
        raise http.client.BadStatusLine(repr(answer[:64]))
    return int(words[1][:3])
