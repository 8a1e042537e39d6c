"""URLs and the bytes of requests."""

import pytest

from relay.bench.target import Target, parse_target
from relay.errors import StartError


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("http://127.0.0.1:8000", Target(host="127.0.0.1", port=8000, tls=False)),
        ("http://127.0.0.1:8000/v1/", Target(host="127.0.0.1", port=8000, tls=False)),
        ("https://example.org/api/v1", Target(host="example.org", port=443, tls=True, base="/api")),
        ("http://[::1]:80", Target(host="::1", port=80, tls=False)),
    ],
)
def test_urls_with_and_without_v1(url: str, target: Target) -> None:
    assert parse_target(url) == target


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x", "http://", "http://x:99999"])
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(StartError, match="expected something like"):
        parse_target(url)


def test_a_key_that_would_break_the_header_is_refused() -> None:
    with pytest.raises(StartError, match="the key"):
        parse_target("http://x", "secret\r\nX: y")


def test_a_request_is_whole() -> None:
    data = parse_target("http://[::1]:80/base", "secret").request("POST", "/v1/completions", b"{}")
    head, body = data.split(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    assert lines[0] == b"POST /base/v1/completions HTTP/1.1"
    assert b"Host: [::1]:80" in lines
    assert b"Authorization: Bearer secret" in lines
    assert b"Content-Length: 2" in lines
    assert body == b"{}"
