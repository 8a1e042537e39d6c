"""Who may reach which route: every request passes here, before its body is read, and becomes a `Caller` or a 401 or 403.

With a key file every route but /healthz, /health and /ping asks for a key (and those that `auth.open_routes` leaves open), unknown paths
too, so that nothing can be learned without one. Without a key file every route is open, but for those about the inside of the server
(`/debug`, `/admin` and whatever is not named here), which then answer this machine only.
"""

import ipaddress
import re
import time
from collections.abc import Iterable
from urllib.parse import urlsplit

from relay.auth.caller import ANYONE, Caller
from relay.auth.credentials import presented
from relay.auth.keyfile import KeyFile
from relay.errors import Forbidden, RequestError
from relay.http.exchange import Scope

_ALWAYS_OPEN = ("/healthz", "/health", "/ping")
_ANY_KEY = ("/readyz", "/version")
_FORWARDED = re.compile(  # what proxies add, by their manuals; one that adds nothing cannot be told from a program on this machine
    rb"(x-)?forwarded(-.*)?|x-original-.*|x-(real|client|cluster-client|azure-client)-?ip|(true|cf|fastly|fly)-(client|connecting)-ip"
    rb"|cf-connecting-ipv6|x-envoy-.*|x-proxyuser-ip|cdn-loop|via|client-ip|x-appengine-.*|x-arr-.*"
)


class Access:
    """`keys` None: no key is asked for. `route` is a route's path as it was declared, None if the request has found none."""

    def __init__(self, keys: KeyFile | None, open_routes: Iterable[str] = ()) -> None:
        self._keys = keys
        self._open = frozenset((*_ALWAYS_OPEN, *open_routes))

    def enter(self, scope: Scope, route: str | None) -> Caller:
        """Raises Unauthorized, Forbidden."""
        if self._keys is None:
            if scope_of(route) == "admin" and not is_local(scope):
                raise Forbidden("without keys this route answers the machine itself only; configure auth.keys_file and send an admin key")
            return ANYONE
        if route in self._open:
            return ANYONE
        if self._keys.ring is None:
            raise RequestError("the server's key file cannot be read, so that nobody is let in; its log says why")
        caller = self._keys.ring.find(presented(scope["headers"]), time.time())
        wanted = scope_of(route)
        if wanted is not None and not caller.has(wanted):
            raise Forbidden(f"this route wants a key with the scope `{wanted}`; the API key `{caller.name}` has {', '.join(caller.scopes)}")
        return caller


def scope_of(route: str | None) -> str | None:
    """The scope that a route wants; None if any key will do. A route that nobody thought of here is the administrators'."""
    if route is None or route in _ALWAYS_OPEN or route in _ANY_KEY:
        return None
    if route == "/metrics":
        return "metrics"
    return "inference" if route.startswith("/v1/") else "admin"


def is_local(scope: Scope) -> bool:
    """Whether it comes from this machine, by somebody's own hand: from loopback, through no proxy, and sent by no foreign web page.

    A page in the operator's browser reaches loopback too: it names its own origin, or (after rebinding its name to 127.0.0.1) its own host.
    """
    client = scope.get("client")
    if client is None or not _is_loopback(client[0]):
        return False
    host = ""
    origin = None
    for name, value in scope["headers"]:
        if _FORWARDED.fullmatch(name):
            return False
        if name == b"host":
            host = value.decode("latin-1")
        elif name == b"origin":
            origin = value.decode("latin-1")
        elif name == b"sec-fetch-site" and value in (b"cross-site", b"same-site"):
            return False
    return _is_own_name(host) and origin in (None, f"http://{host}", f"https://{host}")


def _is_loopback(address: str) -> bool:
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return (mapped or found).is_loopback


def _is_own_name(host: str) -> bool:
    """A Host header that no foreign name server can have made: `localhost`, or an address."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    if name == "localhost":
        return True
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True
