"""Keys on two gateways: who gets in, what a key reaches and sees, and limits that hold to the token over both, whoever dies."""

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from relay.auth.keys import hash_of
from relay.http.generate import Served
from relay.http.records import Records
from relay.http.routes import ServerRoutes
from tests.http.keyed.asking import KEYS, OPEN, ORIGIN, Held, at_once, entry, gateways, generate, key, life, on_each, send
from tests.running import RunningServer, until


def test_every_route_but_health_wants_a_key(server: RunningServer) -> None:
    """vllm#18892: routes outside /v1 were open; every shape of a missing or wrong key."""

    async def nobody(kind: str, body: bytes, deadline_s: float) -> Any:
        raise AssertionError

    table = ServerRoutes(nobody, Records(1), Served(name="m", max_context=1, created=0)).table()
    generation = ["POST /v1/chat/completions", "POST /v1/completions", "GET /v1/requests/{id}/stream"]
    routes = [*table, *generation, "GET /nowhere", "DELETE /v1/models", "OPTIONS /v1/models"]
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
    with httpx.Client(base_url=server.url, timeout=300) as client:
        for route in routes:
            method, path = route.replace("{name:path}", "smollm2").replace("{id}", "x").replace("{name}", "x").split()
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
    for response in on_each(server, f"/v1/requests/{inside['request_id']}/ledger"):
        assert response.json()["request_id"] == inside["request_id"]
    assert send(server, "bob", "GET", f"/v1/requests/{inside['request_id']}/ledger").status_code == 404


def test_whole_server_routes_say_the_same_on_each_gateway(server: RunningServer) -> None:
    generate(server, "alice")
    pages = [response.text for response in on_each(server, "/metrics")]
    for page in pages:
        assert all(f'worker="{worker}"' in page for worker in ("gateway-0", "gateway-1", "router-0", "engine-0"))
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
    until(lambda: status("carol") == {200}, 120)
    keys_file.write_text("- {")
    until(lambda: server.log().count("the key file is broken") >= 2, 120)
    assert status("carol") == {200}
    keys_file.write_text(good)
    until(lambda: status("carol") == {401}, 120)
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
    assert send(server, None, "OPTIONS", "/v1/models", headers={**asking, "Origin": "https://elsewhere.example"}).status_code == 401


def minutes_of(asked: Callable[[], list[httpx.Response]]) -> tuple[int, list[httpx.Response]]:
    """How many windows of a minute the requests can have met, one on a machine that is not very slow, and their answers."""
    began = time.monotonic()
    answers = asked()
    return 1 + int((time.monotonic() - began) // 60), answers


def test_requests_a_minute_are_exact_over_two_gateways(server: RunningServer) -> None:
    minutes, answers = minutes_of(lambda: at_once(30, server, "ten"))
    n_served = [answer.status_code for answer in answers].count(200)
    assert 10 <= n_served <= 10 * minutes
    assert {answer.status_code for answer in answers} <= {200, 429}
    if n_served == 30:
        return  # it took some minutes, and there is nothing to say of refusals
    assert len(dict.fromkeys(life(answer) for answer in answers if answer.status_code == 200)) == 2
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert refused.headers["x-ratelimit-limit-requests"] == "10"
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert re.fullmatch(r"1m0s|[0-9.]+s", refused.headers["x-ratelimit-reset-requests"])
    assert "x-ratelimit-limit-tokens" not in refused.headers
    left = sorted(int(answer.headers["x-ratelimit-remaining-requests"]) for answer in answers if answer.status_code == 200)
    assert sorted({*left}) == list(range(10))
    page = server.http.get("/metrics").text
    limited = re.findall(r'^relay_key_limited_total\{key="ten",limit="requests".*\} (\S+)$', page, re.MULTILINE)
    assert sum(map(float, limited)) == 30 - n_served


def test_tokens_a_minute_are_exact_over_two_gateways(server: RunningServer) -> None:
    n_prompt = generate(server, "alice").json()["usage"]["prompt_tokens"]
    minutes, answers = minutes_of(lambda: at_once(20, server, "tokens", max_tokens=10 - n_prompt))
    n_served = [answer.status_code for answer in answers].count(200)
    assert 10 <= n_served <= 10 * minutes
    assert {answer.status_code for answer in answers} <= {200, 429}
    assert sum(answer.json()["usage"]["total_tokens"] for answer in answers if answer.status_code == 200) == 10 * n_served
    for refused in [answer for answer in answers if answer.status_code == 429][:1]:
        assert refused.headers["x-ratelimit-limit-tokens"] == "100"
        assert refused.headers["x-ratelimit-remaining-tokens"] == "0"
    never = generate(server, "tokens", max_tokens=500)
    assert never.status_code == 400
    assert "100 a minute" in never.json()["error"]["message"]


def test_places_come_back_when_clients_leave(server: RunningServer) -> None:
    streams = [Held(server, "two") for _ in range(2)]
    refused = generate(server, "two")
    assert refused.status_code == 429
    assert refused.headers["retry-after"] == "1"
    streams[0].socket.close()
    until(lambda: generate(server, "two").status_code == 200, 120)
    more = Held(server, "two")
    assert generate(server, "two").status_code == 429
    for stream in (streams[1], more):
        stream.socket.close()
    until(lambda: {answer.status_code for answer in at_once(2, server, "two")} == {200}, 120)


def test_places_come_back_when_a_gateway_is_killed(server: RunningServer) -> None:
    streams = [Held(server, "two") for _ in range(2)]
    assert generate(server, "two").status_code == 429
    page = server.http.get("/metrics").text
    busy = re.findall(r'^relay_requests_in_flight\{worker="(gateway-\d)"\} ([1-9])', page, re.MULTILINE)
    name, count = busy[0]
    os.kill(server.pids()[name], signal.SIGKILL)
    with contextlib.closing(streams[0].socket), contextlib.closing(streams[1].socket):

        def granted() -> int:
            found = 0
            for _ in range(3):
                with contextlib.suppress(httpx.TransportError):  # a connection that the dead one had taken
                    found += generate(server, "two").status_code == 200
            return found

        until(lambda: granted() == 3, 120)  # one after the other: the dead one's places are free, those of a living stream are not
        if int(count) == 1:
            again = Held(server, "two")
            assert generate(server, "two").status_code == 429
            again.socket.close()
    until(lambda: len(gateways(server)) == 2, 120)


def test_counts_survive_the_death_of_who_counts(server: RunningServer) -> None:
    began = time.monotonic()
    assert [answer.status_code for answer in at_once(2, server, "four")] == [200, 200]
    before = server.pids()["router-0"]
    os.kill(before, signal.SIGKILL)
    until(lambda: server.pids()["router-0"] != before, 120)
    answers = at_once(5, server, "four")
    within_a_minute = time.monotonic() - began < 60  # afterwards the first two count no more
    assert sorted(answer.status_code for answer in answers) == ([200] * 2 + [429] * 3 if within_a_minute else [200] * 4 + [429])


def test_logs_and_metrics_name_keys_and_never_show_them(server: RunningServer) -> None:
    generate(server, "alice")
    log, page = server.log(), server.http.get("/metrics").text
    assert re.search(r'"key": ?"alice"|key=alice', log)
    assert re.search(r'^relay_key_requests_total\{key="alice",status="200",worker="gateway-\d"\}', page, re.MULTILINE)
    assert re.search(r'^relay_auth_refused_total\{status="401",worker="gateway-\d"\} [1-9]', page, re.MULTILINE)
    for name in KEYS:
        assert key(name) not in log
        assert key(name) not in page


def test_a_strangers_attempts_are_not_on_record(server: RunningServer) -> None:
    """They would push out the records of others."""
    assert generate(server, None, headers={"X-Request-ID": "stranger"}).status_code == 401
    assert {response.status_code for response in on_each(server, "/v1/requests/stranger/ledger")} == {404}
