"""JSON bytes for the wire, from text and structs: what the response, stream and error builders share.

UTF-8 is sent as it is, but for three characters that some readers of event streams take for line ends although the protocol does not
(Python's `str.splitlines`, and so httpx's `iter_lines`): U+0085, U+2028 and U+2029 go as escapes.
"""

from typing import Any

import msgspec

_ENCODE = msgspec.json.Encoder().encode


def json_text(text: str) -> bytes:
    """A JSON string, quotes included. `text` has no lone surrogates: it was decoded from UTF-8."""
    return _ENCODE(text) if text.isascii() else _one_line(_ENCODE(text))


def json_value(value: Any) -> bytes:
    """Any struct or plain value; a NaN or an infinity becomes null."""
    return _one_line(_ENCODE(value))


def _one_line(out: bytes) -> bytes:
    return out.replace(b"\xc2\x85", b"\\u0085").replace(b"\xe2\x80\xa8", b"\\u2028").replace(b"\xe2\x80\xa9", b"\\u2029")
