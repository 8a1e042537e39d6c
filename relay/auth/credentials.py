"""The API keys that a request's headers present: `Authorization: Bearer KEY`, or `x-api-key: KEY`."""

import re
from collections.abc import Iterable

_MOST_BYTES = 512
_BEARER = re.compile(rb"[ \t]*bearer[ \t]+([^ \t]+)[ \t]*", re.IGNORECASE)


def presented(headers: Iterable[tuple[bytes, bytes]]) -> tuple[bytes, ...]:
    """Bearer keys first. Names are in lower case, as ASGI has them. Whatever is no key (another scheme, nothing, too long) counts as none.

    The scheme is matched without case and with any blanks around the key, as clients send it. A header that is there twice makes two
    candidates: who has a right key among them has it, so nothing is won by confusing a proxy.
    """
    bearers, others = [], []
    for name, value in headers:
        if name == b"authorization":
            found = _BEARER.fullmatch(value)
            if found is not None and len(found[1]) <= _MOST_BYTES:
                bearers.append(found[1])
        elif name == b"x-api-key":
            key = value.strip(b" \t")
            if 0 < len(key) <= _MOST_BYTES:
                others.append(key)
    return (*bearers, *others)
