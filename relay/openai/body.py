"""A request body: bytes in, one JSON object out, or InvalidRequest saying what is wrong with the bytes.

msgspec decodes (it refuses NaN, Infinity, lone surrogates and bad UTF-8, where `json` lets them in). Three things that
it lets pass are refused here: more of something than `_MOST` allows, nesting deeper than `MAX_DEPTH`, which later readers such as templates
would recurse into, and an object that has a key twice, where each reader would believe another one.

Decoding keeps the GIL, on a thread too, so its time is every stream's time: 8 MiB of keys take 400 ms, of `[]` or of short strings above
100 ms. What `_MOST` lets through takes 20 to 40 ms at worst, and what no prompt can be made of is not among it. The look at the body before
that goes in pieces.
"""

import codecs
import json
import re
from collections import Counter
from typing import Any

import msgspec

from relay.errors import InvalidRequest

MAX_DEPTH = 64
MAX_CONTAINERS = 1 << 15
_MOST = {"arrays and objects": MAX_CONTAINERS, "keys": 1 << 16, "strings": 1 << 17, "values": 1 << 20}
_PIECE_BYTES = 64 << 10

_DECODER = msgspec.json.Decoder()
_ONE_KIND = bytes.maketrans(b"{}", b"[]")
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_HALF_PAIR = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])")


def parse_object(body: bytes) -> dict[str, Any]:
    """Raises InvalidRequest."""
    body = body.removeprefix(codecs.BOM_UTF8)  # which some editors and shells put in front
    if body[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) or b"\0" in body[:4]:
        raise InvalidRequest("the body is UTF-16 or UTF-32; JSON is sent as UTF-8")
    if not body.strip():
        raise InvalidRequest("the body is empty; expected a JSON object")
    brackets, n_keys = shape(body)
    try:
        value = _DECODER.decode(body)
    except RecursionError:
        raise _too_deep() from None
    except msgspec.DecodeError as error:
        hint = "; a \\uD8xx escape needs its low half, \\uDCxx, right after it" if _HALF_PAIR.search(body) else ""
        raise InvalidRequest(f"the body is not valid JSON: {error}{hint}") from None
    if _is_deep(brackets):
        raise _too_deep()
    if not isinstance(value, dict):
        raise InvalidRequest(f"the body is {shown(value)}; expected a JSON object")
    if _n_keys(value, n_keys) < n_keys:
        _KEYS.decode(body.decode())
    return value


def shape(body: bytes, piece_bytes: int = _PIECE_BYTES) -> tuple[bytes, int]:
    """What is outside its strings: brackets, all of one kind, and the number of keys. Raises InvalidRequest for too much of something."""
    n: Counter[str] = Counter()
    brackets = []
    start, inside = 0, 0
    while start < len(body):
        piece = body[start : start + piece_bytes]  # of two bytes at least
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2 and len(piece) > 1:
            piece = piece[:-1]  # an escape stays whole
        start += len(piece)
        parts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[inside::2])
        n["strings"] += len(parts) // 2
        inside ^= (len(parts) - 1) & 1
        n["keys"] += outside.count(b":")
        n["values"] += outside.count(b",")
        brackets.append(outside.translate(_ONE_KIND, delete=_NOT_BRACKETS))
        n["arrays and objects"] += brackets[-1].count(b"[")
        for what, most in _MOST.items():
            if n[what] > most:
                raise InvalidRequest(f"the body has more than {most} {what}; send less at once")
    return b"".join(brackets), n["keys"]


def _n_keys(value: Any, enough: int) -> int:
    """Of all objects in a value, or of so many that they are enough."""
    n, left = 0, [value]
    while left and n < enough:
        match left.pop():
            case dict() as found:
                n += len(found)
                left += [each for each in found.values() if isinstance(each, dict | list)]
            case found:
                left += [each for each in found if isinstance(each, dict | list)]
    return n


def _is_deep(brackets: bytes) -> bool:
    """Whether balanced brackets nest deeper than MAX_DEPTH: each pass takes the innermost level away."""
    for _ in range(MAX_DEPTH):
        if not brackets:
            return False
        brackets = brackets.replace(b"[]", b"")
    return bool(brackets)


def _too_deep() -> InvalidRequest:
    return InvalidRequest(f"the body nests arrays and objects too deep; at most {MAX_DEPTH} levels are read")


def _refuse_twice(pairs: list[tuple[str, Any]]) -> None:
    if len({key for key, _ in pairs}) == len(pairs):
        return
    seen = set()
    for key, _ in pairs:
        if key in seen:
            raise InvalidRequest(f"the key {shown(key)} is twice in one object; send it once", param=key[:64])
        seen.add(key)


_KEYS = json.JSONDecoder(object_pairs_hook=_refuse_twice)


def shown(value: Any) -> str:
    """A JSON value for an error text: short, whatever the client sent."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case int() if abs(value) >= 1 << 64:
            return f"an integer of {value.bit_length()} bits"
        case str() if len(value) > 48:
            return f"a string of {len(value)} characters"
        case str():
            return json.dumps(value, ensure_ascii=False)
        case list():
            return f"an array of {len(value)}"
        case dict():
            return "an object"
        case _:
            return repr(value)
