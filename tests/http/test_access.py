"""Which route wants what, and who counts as being on this machine; without a server."""

from pathlib import Path
from typing import Any

import pytest

from relay.auth.entry import Entry
from relay.auth.keyfile import KeyFile, append
from relay.auth.keys import hash_of
from relay.errors import Forbidden, RequestError, Unauthorized
from relay.http.access import Access, is_local, scope_of


@pytest.fixture(autouse=True)
def _law_of_blocks() -> None:
    """No server, no blocks."""


def scope(client: str | None = "127.0.0.1", **headers: str) -> dict[str, Any]:
    given = {"host": "localhost:8000", **headers}
    return {
        "client": (client, 5000) if client else None,
        "headers": [(name.replace("_", "-").encode(), value.encode()) for name, value in given.items()],
    }


@pytest.mark.parametrize(
    ("route", "wanted"),
    [
        ("/healthz", None),
        ("/readyz", None),
        ("/health", None),
        ("/version", None),
        (None, None),
        ("/metrics", "metrics"),
        ("/v1/models", "inference"),
        ("/v1/requests/{id}/ledger", "inference"),
        ("/debug/kv", "admin"),
        ("/admin/kill", "admin"),
        ("/something/new", "admin"),
    ],
)
def test_a_route_that_nobody_thought_of_is_the_administrators(route: str | None, wanted: str | None) -> None:
    assert scope_of(route) == wanted


@pytest.mark.parametrize(
    ("local", "request_scope"),
    [
        (True, scope()),
        (True, scope("127.9.9.9", host="127.0.0.1:8000")),
        (True, scope("::1", host="[::1]:8000")),
        (True, scope("::ffff:127.0.0.1")),
        (True, scope(origin="http://localhost:8000", sec_fetch_site="same-origin")),
        (False, scope("10.0.0.1")),
        (False, scope("::ffff:10.0.0.1")),
        (False, scope(None)),
        (False, scope("testclient")),
        (False, scope(x_forwarded_for="127.0.0.1")),
        (False, scope(forwarded="for=127.0.0.1")),
        (False, scope(via="1.1 nginx")),
        (False, scope(x_forwarded_proto="https")),
        (False, scope(x_forwarded_anything="1")),
        (False, scope(x_client_ip="1.2.3.4")),
        (False, scope(true_client_ip="1.2.3.4")),
        (False, scope(cf_connecting_ip="1.2.3.4")),
        (False, scope(x_original_forwarded_for="1.2.3.4")),
        (False, scope(x_envoy_external_address="1.2.3.4")),
        (True, scope(x_request_id="forwarded")),
        (False, scope(origin="https://evil.example")),
        (False, scope(origin="null")),
        (False, scope(sec_fetch_site="cross-site")),
        (False, scope(host="evil.example:8000")),  # its name was rebound to 127.0.0.1
        (False, scope(host="localhost.evil.example")),
        (False, scope(host="")),
        (False, scope(host="[")),
    ],
)
def test_only_this_machines_own_hand_is_local(local: bool, request_scope: dict[str, Any]) -> None:
    assert is_local(request_scope) == local


def test_without_keys_all_is_open_but_the_inside_of_the_server() -> None:
    """vllm#33412: clients send `Bearer None` where there are no keys."""
    access = Access(None)
    for client in ("127.0.0.1", "10.0.0.1"):
        for route in ("/v1/models", "/metrics", "/readyz", "/v1/requests/{id}/ledger", None):
            assert access.enter(scope(client, authorization="Bearer None"), route).name is None
    assert access.enter(scope(), "/debug/kv").name is None
    with pytest.raises(Forbidden, match="this route answers the machine itself only"):
        access.enter(scope("10.0.0.1"), "/debug/kv")


def test_with_keys_loopback_is_nothing_special(tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "keys.yaml")
    append(file.path, Entry(name="a", sha256=hash_of(b"ka")))
    append(file.path, Entry(name="root", sha256=hash_of(b"kr"), scopes=("admin",)))
    file.load()
    access = Access(file, ["/metrics"])
    with pytest.raises(Unauthorized):
        access.enter(scope(), "/debug/kv")
    with pytest.raises(Unauthorized):
        access.enter(scope(), None)
    with pytest.raises(Forbidden, match="scope `admin`"):
        access.enter(scope(authorization="Bearer ka"), "/debug/kv")
    assert access.enter(scope("10.0.0.1", authorization="Bearer kr"), "/debug/kv").is_admin
    assert access.enter(scope(x_api_key="ka"), "/v1/models").name == "a"
    assert access.enter(scope(), "/metrics").name is None
    for route in ("/healthz", "/health", "/ping"):
        assert access.enter(scope(), route).name is None
    with pytest.raises(Unauthorized):
        access.enter(scope(), "/version")


def test_a_file_that_was_never_right_lets_nobody_in(tmp_path: Path) -> None:
    access = Access(KeyFile(tmp_path / "keys.yaml"))
    with pytest.raises(RequestError, match="cannot be read"):
        access.enter(scope(authorization="Bearer k"), "/v1/models")
    assert access.enter(scope(), "/healthz").name is None
