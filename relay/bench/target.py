"""Where requests go: a URL in, the bytes of whole HTTP/1.1 requests out."""

from urllib.parse import urlsplit

import msgspec

from relay.errors import StartError


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """`base` is the path in front of `/v1`."""

    host: str
    port: int
    tls: bool
    base: str = ""
    key: str | None = None

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        """One request, on a connection that is to be kept."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        head = f"{method} {self.base}{path} HTTP/1.1\r\nHost: {host}:{self.port}\r\nUser-Agent: relay-bench\r\nAccept: */*\r\n"
        if self.key:
            head += f"Authorization: Bearer {self.key}\r\n"
        if body:
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        return head.encode() + b"\r\n" + body


def parse_target(url: str, key: str | None = None) -> Target:
    """With or without `/v1` at the end. Raises StartError."""
    expected = "expected something like http://127.0.0.1:8000"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise StartError(f"the URL `{url}`: {error}; {expected}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise StartError(f"the URL is `{url}`; {expected}")
    if key is not None and not (key.isascii() and key.isprintable()):
        raise StartError("the key has characters that no HTTP header can hold")
    tls = parts.scheme == "https"
    base = parts.path.rstrip("/").removesuffix("/v1")
    return Target(host=parts.hostname, port=port or (443 if tls else 80), tls=tls, base=base, key=key)
