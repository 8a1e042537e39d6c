"""Limits hold over both gateways together, to the request and to the token, whoever dies."""

import contextlib
import os
import re
import signal

import httpx

from tests.http.keyed.asking import Held, at_once, gateways, generate, life
from tests.running import RunningServer, until


def test_requests_a_minute_are_exact_over_two_gateways(server: RunningServer) -> None:
    answers = at_once(30, server, "ten")
    assert sorted(answer.status_code for answer in answers) == [200] * 10 + [429] * 20
    assert len(dict.fromkeys(life(answer) for answer in answers if answer.status_code == 200)) == 2
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert refused.headers["x-ratelimit-limit-requests"] == "10"
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert re.fullmatch(r"1m0s|[0-9.]+s", refused.headers["x-ratelimit-reset-requests"])
    assert "x-ratelimit-limit-tokens" not in refused.headers
    left = sorted(int(answer.headers["x-ratelimit-remaining-requests"]) for answer in answers if answer.status_code == 200)
    assert left == list(range(10))
    page = server.http.get("/metrics").text
    limited = re.findall(r'^relay_key_limited_total\{key="ten",limit="requests".*\} (\S+)$', page, re.MULTILINE)
    assert sum(map(float, limited)) == 20


def test_tokens_a_minute_are_exact_over_two_gateways(server: RunningServer) -> None:
    n_prompt = generate(server, "alice").json()["usage"]["prompt_tokens"]
    answers = at_once(20, server, "tokens", max_tokens=10 - n_prompt)
    assert sorted(answer.status_code for answer in answers) == [200] * 10 + [429] * 10
    assert sum(answer.json()["usage"]["total_tokens"] for answer in answers if answer.status_code == 200) == 100
    refused = next(answer for answer in answers if answer.status_code == 429)
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
    until(lambda: generate(server, "two").status_code == 200, 10)
    more = Held(server, "two")
    assert generate(server, "two").status_code == 429
    for stream in (streams[1], more):
        stream.socket.close()
    until(lambda: {answer.status_code for answer in at_once(2, server, "two")} == {200}, 10)


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

        until(lambda: granted() == 3, 20)  # one after the other: the dead one's places are free, those of a living stream are not
        if int(count) == 1:
            again = Held(server, "two")
            assert generate(server, "two").status_code == 429
            again.socket.close()
    until(lambda: len(gateways(server)) == 2, 60)


def test_counts_survive_the_death_of_who_counts(server: RunningServer) -> None:
    assert [answer.status_code for answer in at_once(2, server, "four")] == [200, 200]
    before = server.pids()["router-0"]
    os.kill(before, signal.SIGKILL)
    until(lambda: server.pids()["router-0"] != before, 30)
    answers = at_once(5, server, "four")
    assert sorted(answer.status_code for answer in answers) == [200] * 2 + [429] * 3
