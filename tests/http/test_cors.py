"""What browsers are told, without a server."""

from typing import Any

import pytest

from relay.config import CorsConfig
from relay.http.cors import Cors

PAGE = "https://page.example"


@pytest.fixture(autouse=True)
def _law_of_blocks() -> None:
    """No server, no blocks."""


def scope(method: str = "OPTIONS", **headers: str) -> dict[str, Any]:
    return {"method": method, "headers": [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in headers.items()]}


def preflight(origin: str = PAGE, headers: str = "authorization") -> dict[str, Any]:
    return scope(origin=origin, access_control_request_method="POST", access_control_request_headers=headers)


def test_unconfigured_there_are_no_cors_headers() -> None:
    cors = Cors(CorsConfig())
    assert cors.headers(scope("GET", origin=PAGE)) == {}
    assert cors.preflight(preflight()) is None


def test_an_allowed_origin_is_named_and_another_is_not() -> None:
    cors = Cors(CorsConfig(allow_origins=(PAGE,)))
    assert cors.headers(scope("GET", origin=PAGE))["access-control-allow-origin"] == PAGE
    for other in ("https://page.example.evil", "http://page.example", "null", PAGE + "/"):
        assert cors.headers(scope("GET", origin=other)) == {"vary": "origin"}
        assert cors.preflight(preflight(other)) is None
    assert cors.headers(scope("GET")) == {"vary": "origin"}


def test_any_origin_is_told_so() -> None:
    cors = Cors(CorsConfig(allow_origins=("*",)))
    headers = cors.headers(scope("GET", origin="null"))
    assert headers["access-control-allow-origin"] == "*"
    assert "vary" not in headers
    assert cors.preflight(preflight("https://anywhere.example")) is not None


def test_asked_for_headers_are_said_again_since_a_star_leaves_out_authorization() -> None:
    answer = Cors(CorsConfig(allow_origins=(PAGE,))).preflight(preflight(headers="authorization,x-stainless-os"))
    assert answer is not None
    assert answer["access-control-allow-headers"] == "authorization,x-stainless-os"
    for odd in ("", "a\x00b", "é", "x" * 5000):
        answer = Cors(CorsConfig(allow_origins=(PAGE,))).preflight(preflight(headers=odd))
        assert answer is not None
        assert "access-control-allow-headers" not in answer
    named = Cors(CorsConfig(allow_origins=(PAGE,), allow_headers=("authorization",), max_age_s=7)).preflight(preflight(headers="x-other"))
    assert named is not None
    assert named["access-control-allow-headers"] == "authorization"
    assert named["access-control-max-age"] == "7"


def test_options_that_ask_for_nothing_are_no_preflight() -> None:
    cors = Cors(CorsConfig(allow_origins=("*",)))
    assert cors.preflight(scope(origin=PAGE)) is None
    assert cors.preflight(scope("GET", origin=PAGE, access_control_request_method="POST")) is None
