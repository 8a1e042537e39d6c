"""Requests that nobody sends by accident: bodies that cost a parser dear, numbers that are none, framing that two servers read differently.

Each is answered with a 4xx, served, or cut off; never with a fault of the server's.
"""

import gzip
import json
import random
from collections.abc import Callable

from relay.chaos.attack.target import Broken, Target, request, status

_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_FAULTS_THAT_ARE_NONE = (501, 503, 504, 505)  # not known, not now, not in time, not this version


def _post(body: bytes, path: str = _COMPLETIONS) -> Callable[[random.Random], bytes]:
    return lambda _: request("POST", path, body)


def _stops(draw: random.Random) -> bytes:
    stops = ["".join(draw.choices(_LETTERS, k=1024)) for _ in range(16)]
    fields = {"prompt": ["Hi 0", "Hi 1"], "n": 64, "best_of": 64, "temperature": 1, "seed": 1, "max_tokens": 1, "stop": stops}
    return request("POST", _COMPLETIONS, json.dumps(fields).encode())


def _framed(*lines: str, body: bytes = b"") -> Callable[[random.Random], bytes]:
    return lambda _: "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def _chunked(chunks: bytes, *headers: str) -> Callable[[random.Random], bytes]:
    return _framed(f"POST {_COMPLETIONS} HTTP/1.1", "Host: x", "Connection: close", "Transfer-Encoding: chunked", *headers, body=chunks)


_GET = "GET /healthz HTTP/1.1"
_SMALL = b'{"prompt":"Hi","max_tokens":1,"temperature":0}'

BODIES: dict[str, Callable[[random.Random], bytes]] = {
    "escaped quotes": _post(b'{"a":' + b"[" * 65 + b'"' + b'\\"' * 200_000, _CHAT),
    "deep lists": _post(b'{"prompt":' + b"[" * 200_000),
    "deep objects": _post(b'{"a":' * 100_000, _CHAT),
    "NaN": _post(b'{"prompt":"x","temperature":NaN}'),
    "infinity": _post(b'{"prompt":"x","temperature":1e999,"top_p":-Infinity}'),
    "long number": _post(b'{"prompt":"x","max_tokens":' + b"9" * 100_000 + b"}"),
    "tiny penalty": _post(b'{"prompt":"x","max_tokens":1,"temperature":0,"repetition_penalty":1e-38}'),
    "surrogates": _post(b'{"prompt":"' + b"\\ud800" * 20_000 + b'","max_tokens":1}'),
    "not UTF-8": _post(b'{"prompt":"' + b"\xff\xfe\xed\xa0\x80" * 20_000 + b'"}'),
    "byte order mark": _post(b"\xef\xbb\xbf" + _SMALL),
    "UTF-16": _post(_SMALL.decode().encode("utf-16")),
    "zeros": _post(b"\0" * 1_000_000),
    "huge key": _post(b'{"' + b"k" * 4_000_000 + b'":1,"prompt":"x","max_tokens":1}'),
    "many keys": _post(b"{" + b",".join(b'"%d":1' % i for i in range(100_000)) + b"}"),
    "many ids": _post(b'{"max_tokens":1,"prompt":[' + b"1," * 1_000_000 + b"1]}"),
    "ids that are none": _post(b'{"max_tokens":1,"prompt":[-1,1e9,4294967296,99999999999999999999]}'),
    "long text": _post(b'{"max_tokens":1,"prompt":"' + b"a " * 2_000_000 + b'"}'),
    "one word": _post(b'{"max_tokens":1,"prompt":"' + b"a" * 4_000_000 + b'"}'),
    "digits": _post(b'{"messages":[{"role":"user","content":"' + b"7" * 4_000_000 + b'"}]}', _CHAT),
    "many messages": _post(b'{"messages":[' + b'{"role":"user","content":"x"},' * 60_000 + b'{"role":"user","content":"x"}]}', _CHAT),
    "many prompts": _post(b'{"max_tokens":1,"prompt":[' + b'"a",' * 200_000 + b'"a"]}'),
    "many choices": _post(b'{"max_tokens":1,"n":128,"best_of":128,"prompt":[' + b'"a",' * 4_000 + b'"a"]}'),
    "biases": _post(b'{"prompt":"x","max_tokens":1,"logit_bias":{' + b",".join(b'"%d":1' % i for i in range(100_000)) + b"}}"),
    "stop automata": _stops,
    "a lie about gzip": lambda _: request("POST", _COMPLETIONS, gzip.compress(_SMALL), "Content-Encoding: gzip"),
    "br that is none": lambda _: request("POST", _COMPLETIONS, _SMALL, "Content-Encoding: br"),
}

FRAMES: dict[str, Callable[[random.Random], bytes]] = {
    "two lengths": _framed(f"POST {_COMPLETIONS} HTTP/1.1", "Host: x", "Content-Length: 5", "Content-Length: 6", body=b"{}    "),
    "length and chunks": _chunked(b"2\r\n{}\r\n0\r\n\r\n", "Content-Length: 5"),
    "signed chunk": _chunked(b"+2\r\n{}\r\n0\r\n\r\n"),
    "hexadecimal chunk": _chunked(b"0x2\r\n{}\r\n0\r\n\r\n"),
    "endless chunk size": _chunked(b"0" * 200_000),
    "chunk extensions": _chunked(b"2;" + b"x" * 100_000 + b"\r\n{}\r\n0\r\n\r\n"),
    "bytes as chunks": _chunked(b"".join(b"1\r\n%c\r\n" % byte for byte in _SMALL) + b"0\r\n\r\n"),
    "trailers": _chunked(b"0\r\n" + b"T: x\r\n" * 20_000 + b"\r\n"),
    "negative length": _framed(f"POST {_COMPLETIONS} HTTP/1.1", "Host: x", "Content-Length: -1"),
    "terabytes": _framed(f"POST {_COMPLETIONS} HTTP/1.1", "Host: x", "Content-Length: 9999999999999", "Expect: 100-continue"),
    "another expectation": _framed(_GET, "Host: x", "Connection: close", "Expect: 200-maybe"),
    "many headers": _framed(_GET, "Host: x", "Connection: close", *(f"X-{i}: {i}" for i in range(5_000))),
    "long header": _framed(_GET, "Host: x", "Connection: close", "X-Long: " + "x" * 200_000),
    "zero in a header": _framed(_GET, "Host: x", "Connection: close", "X-Zero: a\0b"),
    "long path": _framed("GET /" + "a/" * 30_000 + " HTTP/1.1", "Host: x", "Connection: close"),
    "no host": _framed(_GET, "Connection: close"),
    "two hosts": _framed(_GET, "Host: x", "Host: y", "Connection: close"),
    "an absolute target": _framed("GET http://evil.example/admin/workers HTTP/1.1", "Host: x", "Connection: close"),
    "no HTTP": lambda draw: draw.randbytes(4_096) + b"\r\n\r\n",
    "HTTP/2": lambda _: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0" * 1_000,
    "pipelined": lambda _: (
        b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n" * 500 + b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    ),
    "odd names": lambda _: request("POST", _COMPLETIONS, _SMALL, "X-Request-ID: " + "\xff" * 300, "Last-Event-ID: -1:9e9"),
    "odd deadline": lambda _: request("POST", _COMPLETIONS, _SMALL, "X-Request-Timeout: nan"),
}


def bodies(target: Target, draw: random.Random) -> None:
    """One of each, in random order."""
    _send_all(target, draw, BODIES)


def frames(target: Target, draw: random.Random) -> None:
    """One of each, in random order."""
    _send_all(target, draw, FRAMES)


def _send_all(target: Target, draw: random.Random, kinds: dict[str, Callable[[random.Random], bytes]]) -> None:
    names = sorted(kinds)
    draw.shuffle(names)
    for name in names:
        if target.over.is_set():
            return
        try:
            answer = target.send(kinds[name](draw))
        except TimeoutError:
            if target.over.is_set():
                return
            raise Broken(f"`{name}` is neither answered nor cut off") from None
        if answer and status(answer) >= 500 and status(answer) not in _FAULTS_THAT_ARE_NONE:
            raise Broken(f"`{name}` is answered with {answer[:300]!r}")
