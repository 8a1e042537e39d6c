"""Who gets in, what a key reaches and sees, and what changes while the server runs."""

import re
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from relay.auth.keys import hash_of
from relay.http.generate import Served
from relay.http.records import Records
from relay.http.routes import ServerRoutes
from tests.http.keyed.asking import KEYS, OPEN, ORIGIN, entry, generate, key, on_each, send
from tests.running import RunningServer, until


def test_every_route_but_health_wants_a_key(server: RunningServer) -> None:
    """vllm#18892: routes outside /v1 were open; every shape of a missing or wrong key."""

    async def nobody(kind: str, body: bytes, deadline_s: float) -> Any:
        raise AssertionError

    table = ServerRoutes(nobody, Records(1), Served(name="m", max_context=1, created=0)).table()
    routes = [*table, "POST /v1/chat/completions", "POST /v1/completions", "GET /nowhere", "DELETE /v1/models", "OPTIONS /v1/models"]
    wrong: list[dict[str, str]] = [
        {},
        {"Authorization": ""},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer None"},
        {"Authorization": f"Basic {key('alice')}"},
        {"Authorization": f"Bearer {key('alice')}x"},
        {"Authorization": hash_of(key("alice").encode())},
        {"x-api-key": "nobody"},
        {"Cookie": key("alice")},
    ]
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for route in routes:
            method, path = route.replace("{name:path}", "smollm2").replace("{id}", "x").split()
            for headers in wrong:
                response = client.request(method, path, headers=headers, content=b"{}" if method == "POST" else None)
                if route in OPEN:
                    assert response.status_code == 200
                    continue
                assert response.status_code == 401, (route, headers)
                assert response.headers["www-authenticate"] == "Bearer"
                assert response.headers["x-request-id"]
                assert response.json()["error"]["code"] == "invalid_api_key"


def test_a_key_is_taken_however_it_is_spelled(server: RunningServer) -> None:
    k = key("alice")
    for headers in ({"authorization": f"bearer {k}"}, {"Authorization": f"Bearer   {k}"}, {"x-api-key": k}, {"X-Api-Key": k}):
        assert send(server, None, "GET", "/v1/models", headers=headers).status_code == 200
    assert send(server, "old", "GET", "/v1/models").status_code == 401
    assert send(server, "alice", "GET", "/nowhere").status_code == 404


@pytest.mark.parametrize(
    ("name", "path", "status"),
    [
        ("alice", "/v1/models", 200),
        ("alice", "/metrics", 403),
        ("alice", "/debug/kv", 403),
        ("scraper", "/metrics", 200),
        ("scraper", "/v1/models", 403),
        ("scraper", "/debug/kv", 403),
        ("root", "/v1/models", 200),
        ("root", "/metrics", 200),
        ("root", "/debug/kv", 200),
    ],
)
def test_scopes_decide_what_a_key_reaches(server: RunningServer, name: str, path: str, status: int) -> None:
    """On loopback, too, once there are keys."""
    response = send(server, name, "GET", path)
    assert response.status_code == status
    if status == 403:
        assert response.json()["error"]["code"] == "forbidden"


def test_a_key_for_other_models_gets_none_of_this_one(server: RunningServer) -> None:
    response = generate(server, "narrow")
    assert response.status_code == 403
    assert response.json()["error"]["param"] == "model"
    assert send(server, "narrow", "GET", "/v1/models").json()["data"] == []


def test_a_ledger_is_its_own_keys_and_an_admins(server: RunningServer) -> None:
    """Two keys that use one ID do not meet; the later of one key's requests is found, whichever gateway had it."""
    for name in ("alice", "bob"):
        assert generate(server, name, headers={"X-Request-ID": "shared"}).status_code == 200
    last = [generate(server, "alice", headers={"X-Request-ID": "again"}, max_tokens=n).json()["usage"] for n in (1, 2, 3, 4)][-1]
    for name in ("alice", "bob"):
        for response in on_each(server, "/v1/requests/shared/ledger", name):
            assert response.json()["key"] == name
    for response in on_each(server, "/v1/requests/again/ledger"):
        assert response.json()["completion_tokens"] == last["completion_tokens"] == 4
        assert response.json()["key"] == "alice"
    assert {response.status_code for response in on_each(server, "/v1/requests/again/ledger", "bob")} == {404}
    inside = send(server, "alice", "GET", "/v1/requests/again/ledger").json()
    assert inside["spans"]["gateway.auth"] > 0
    assert {response.json()["request_id"] for response in on_each(server, f"/v1/requests/{inside['request_id']}/ledger")} == {
        inside["request_id"]
    }
    assert send(server, "bob", "GET", f"/v1/requests/{inside['request_id']}/ledger").status_code == 404


def test_whole_server_routes_say_the_same_on_each_gateway(server: RunningServer) -> None:
    generate(server, "alice")
    pages = [response.text for response in on_each(server, "/metrics")]
    for page in pages:
        assert {'worker="gateway-0"', 'worker="gateway-1"', 'worker="router-0"', 'worker="engine-0"'} <= dict.fromkeys(
            re.findall(r'worker="[a-z0-9-]+"', page)
        ).keys()
        assert "relay_scrape_silent{" not in page
    generated = [re.findall(r"^relay_key_tokens_total\{key=\"alice\".*$", page, re.MULTILINE) for page in pages]
    assert generated[0] == generated[1]
    assert generated[0]
    pools = [response.json() for response in on_each(server, "/debug/kv")]
    assert [pool["silent"] for pool in pools] == [[], []]
    assert pools[0]["pools"].keys() == pools[1]["pools"].keys() == {"engine-0"}
    assert [response.status_code for response in on_each(server, "/readyz")] == [200, 200]


def test_keys_come_and_go_while_the_server_runs(server: RunningServer, keys_file: Path) -> None:
    good = keys_file.read_text()

    def status(name: str) -> set[int]:
        return {response.status_code for response in on_each(server, "/v1/models", name)}

    assert status("carol") == {401}
    keys_file.write_text(yaml.safe_dump([*yaml.safe_load(good), entry("carol", {})]))
    until(lambda: status("carol") == {200}, 10)
    keys_file.write_text("- {")
    until(lambda: server.log().count("the key file is broken") >= 2, 10)
    assert status("carol") == {200}
    keys_file.write_text(good)
    until(lambda: status("carol") == {401}, 10)
    assert status("alice") == {200}


def test_a_web_page_of_an_allowed_origin_may_call(server: RunningServer) -> None:
    asking = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization, x-stainless-os"}
    preflight = send(server, None, "OPTIONS", "/v1/chat/completions", headers=asking)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == ORIGIN
    assert "POST" in preflight.headers["access-control-allow-methods"]
    assert preflight.headers["access-control-allow-headers"] == "authorization, x-stainless-os"
    for name, status in (("alice", 200), (None, 401)):
        response = send(server, name, "GET", "/v1/models", headers={"Origin": ORIGIN})
        assert response.status_code == status
        assert response.headers["access-control-allow-origin"] == ORIGIN
        assert "x-request-id" in response.headers["access-control-expose-headers"]
    other = send(server, "alice", "GET", "/v1/models", headers={"Origin": "https://elsewhere.example"})
    assert "access-control-allow-origin" not in other.headers
    assert other.headers["vary"] == "origin"
    assert send(server, None, "OPTIONS", "/v1/models", headers={**asking, "Origin": "https://elsewhere.example"}).status_code == 401


def test_logs_and_metrics_name_keys_and_never_show_them(server: RunningServer) -> None:
    generate(server, "alice")
    log, page = server.log(), server.http.get("/metrics").text
    assert re.search(r'"key": ?"alice"|key=alice', log)
    assert re.search(r'^relay_key_requests_total\{key="alice",status="200",worker="gateway-\d"\}', page, re.MULTILINE)
    assert re.search(r'^relay_auth_refused_total\{status="401",worker="gateway-\d"\} [1-9]', page, re.MULTILINE)
    for name in KEYS:
        assert key(name) not in log
        assert key(name) not in page
