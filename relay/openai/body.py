"""A request body: bytes in, one JSON object out, or InvalidRequest saying what is wrong with the bytes.

msgspec decodes (it refuses NaN, Infinity, lone surrogates, bad UTF-8 and byte order marks, where `json` lets them in). Three things that
it lets pass are refused here: more than `MAX_CONTAINERS` arrays and objects (8 MiB of them cost seconds), nesting deeper than
`MAX_DEPTH`, which later readers such as templates would recurse into, and an object that has a key twice, where each reader would
believe another one.
"""

import json
import re
from typing import Any

import msgspec

from relay.errors import InvalidRequest

MAX_DEPTH = 64
MAX_CONTAINERS = 100_000

_DECODER = msgspec.json.Decoder()
# Possessive, and a string without end is one to the end of the body: no byte is looked at twice, whatever is sent.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
_ONE_KIND = bytes.maketrans(b"{}", b"[]")
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_HALF_PAIR = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])")


def parse_object(body: bytes) -> dict[str, Any]:
    """Raises InvalidRequest."""
    if not body.strip():
        raise InvalidRequest("the body is empty; expected a JSON object")
    brackets = b""
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH:
        brackets = _STRING.sub(b"", body).translate(_ONE_KIND, delete=_NOT_BRACKETS)
        if brackets.count(b"[") > MAX_CONTAINERS:
            raise InvalidRequest(f"the body has more than {MAX_CONTAINERS} arrays and objects; send less at once")
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
    _KEYS.decode(body.decode())
    return value


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
