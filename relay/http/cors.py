"""Cross-origin requests: what a browser is told, so that it lets a web page of another origin call the server. Off unless configured.

Cookies play no part here (a key comes in a header that the page itself sets), so credentials are never allowed, and `*` is safe to give.
"""

import re

from relay.config import CorsConfig
from relay.http.exchange import Scope

_HEADER_NAMES = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~, -]{1,4096}")


class Cors:
    def __init__(self, config: CorsConfig) -> None:
        self._any = "*" in config.allow_origins
        self._origins = frozenset(config.allow_origins)
        self._methods = ", ".join(config.allow_methods)
        self._any_header = "*" in config.allow_headers
        self._allow, self._expose = ", ".join(config.allow_headers), ", ".join(config.expose_headers)
        self._max_age = str(config.max_age_s)

    def headers(self, scope: Scope) -> dict[str, str]:
        """For the answer to any request, errors too."""
        if not self._origins:
            return {}
        headers = {} if self._any else {"vary": "origin"}
        origin = _header(scope, b"origin")
        if self._allows(origin):
            headers["access-control-allow-origin"] = "*" if self._any else origin
            if self._expose:
                headers["access-control-expose-headers"] = self._expose
        return headers

    def preflight(self, scope: Scope) -> dict[str, str] | None:
        """The further headers of its answer, or None if it is no preflight of an origin that is allowed. A preflight has no key."""
        asked = _header(scope, b"access-control-request-method")
        if scope["method"] != "OPTIONS" or not asked or not self._allows(_header(scope, b"origin")):
            return None
        headers = {"access-control-allow-methods": self._methods, "access-control-max-age": self._max_age}
        wanted = _header(scope, b"access-control-request-headers")
        if not self._any_header:
            headers["access-control-allow-headers"] = self._allow
        elif _HEADER_NAMES.fullmatch(wanted):  # said again, since a plain `*` would leave out Authorization
            headers["access-control-allow-headers"] = wanted
        return headers

    def _allows(self, origin: str) -> bool:
        return bool(origin) and bool(self._origins) and (self._any or origin in self._origins)


def _header(scope: Scope, wanted: bytes) -> str:
    for name, value in scope["headers"]:
        if name == wanted:
            return str(value, "latin-1")
    return ""
