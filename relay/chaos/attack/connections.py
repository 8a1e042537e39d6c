"""Connections that are opened to be a burden: floods, half requests, bodies on routes that read none, readers that do not read."""

import json
import random
import socket
from contextlib import ExitStack, suppress

from relay.chaos.attack.target import Target, request

_FLOOD, _SLOW, _UNREAD, _DEAF = 150, 40, 20, 6
_BODY = 256 << 10
_HELD_S = 2.0
_BREATH_S = 0.5


def flood(target: Target, draw: random.Random) -> None:
    """Connect and close at once, half of them behind a request that is not waited for; then a breath, since a core answers some hundreds a
    second and no more."""
    for i in range(_FLOOD):
        with target.connect() as sock:
            if i % 2:
                sock.sendall(request("GET", "/healthz"))
    target.rest(_BREATH_S)


def close_wait(target: Target, draw: random.Random) -> None:
    """Answered on a connection that is kept, then closed by the client alone; all of them together."""
    with ExitStack() as stack:
        for _ in range(_SLOW):
            sock = stack.enter_context(target.connect())
            sock.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            sock.recv(4096)


def slow_writers(target: Target, draw: random.Random) -> None:
    """Heads that come byte by byte, and bodies that are short of one byte until their clients leave."""
    with ExitStack() as stack:
        socks = [stack.enter_context(target.connect()) for _ in range(_SLOW)]
        for i, sock in enumerate(socks):
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {_BODY}\r\n"
            with suppress(ConnectionError):
                sock.sendall(head.encode() if i % 2 else head.encode() + b"\r\n" + b" " * (_BODY - 1))
        for byte in b"X-Slow: 1":
            for sock in socks[1::2]:
                with suppress(ConnectionError):
                    sock.send(bytes((byte,)))
            target.rest(_HELD_S / 9)


def slow_readers(target: Target, draw: random.Random) -> None:
    """Streams whose client takes nothing, behind a receive buffer of a few kilobytes."""
    fields = target.unpoisoned(prompt="Once upon a time", max_tokens=32, n=4, best_of=4, stream=True, ignore_eos=True, logprobs=5)
    with ExitStack() as stack:
        for _ in range(_DEAF):
            sock = stack.enter_context(target.connect())
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            sock.sendall(request("POST", "/v1/completions", json.dumps(fields).encode()))
        target.rest(_HELD_S)


def unread_bodies(target: Target, draw: random.Random) -> None:
    """On routes that read none, and on a path that is none; and a second request behind each."""
    with ExitStack() as stack:
        for i in range(_UNREAD):
            sock = stack.enter_context(target.connect())
            line = draw.choice(("GET /healthz", "GET /v1/models", "POST /nowhere", "GET /metrics"))
            framing = f"Content-Length: {_BODY}" if i % 2 else "Transfer-Encoding: chunked"
            with suppress(ConnectionError):
                sock.sendall(f"{line} HTTP/1.1\r\nHost: x\r\n{framing}\r\n\r\n".encode())
                body = b" " * _BODY if i % 2 else b"8000\r\n" + b" " * 0x8000 + b"\r\n"
                sock.sendall(body + b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n" * (i % 4))
        target.rest(_HELD_S / 4)


def leavers(target: Target, draw: random.Random) -> None:
    """Streams that are left: before a byte of the answer, in the prompt, or behind some events; by closing, or with a reset."""
    words = int(min(target.max_context // 2, 400))
    for i in range(6):
        prompt = " ".join(draw.choices(("river", "stone", "boat", "light"), k=words if i % 2 else 8))
        fields = target.unpoisoned(prompt=prompt[: target.max_context // 2], max_tokens=64, stream=True, ignore_eos=True)
        with target.connect() as sock:
            if i % 3 == 0:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            sock.sendall(request("POST", "/v1/completions", json.dumps(fields).encode()))
            for _ in range(draw.randint(0, 3)):
                sock.recv(1024)
