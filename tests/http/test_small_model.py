"""A server of a small random model that decodes one answer at a time: what is placed where, and in what order."""

import concurrent.futures
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.running import RunningServer, running, until

CONFIG = """
model: {source: "random:tiny-llama", name: tiny}
gateway: {bind: 127.0.0.1:0, best_priority: -10}
router: {local_prefill_tokens: 24}
engine: {kv_memory_mib: 32, max_running: 1}
workers:
  - {name: prefill, roles: [prefill]}
  - {name: decode, roles: [decode]}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    path = tmp_path_factory.mktemp("config") / "small.yaml"
    path.write_text(CONFIG)
    with running(path, tmp_path_factory.mktemp("small")) as server:
        yield server


def ask(server: RunningServer, prompt: list[int], **more: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The answer, and where it was placed."""
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True, **more}
    response = server.http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    (decision,) = server.http.get(f"/v1/requests/{response.headers['x-request-id']}/ledger").json()["decisions"]
    return response.json(), decision


def test_a_decode_worker_computes_a_short_prompt_itself_and_a_long_one_is_handed_over(server: RunningServer) -> None:
    """Also a long one of which it has all but a little; and the answers do not show it."""
    long = [20 + i % 200 for i in range(60)]
    handed_over, decision = ask(server, long)
    assert decision["rule"] == "kv_aware"
    assert decision["prefill"][0]["worker"].startswith("prefill/0@")
    until(lambda: ask(server, long)[1]["rule"] == "kv_aware, short enough for decode alone", 120)
    local, decision = ask(server, long)
    assert decision["prefill"] == []
    assert local["choices"] == handed_over["choices"]
    assert local["usage"]["prompt_tokens_details"]["cached_tokens"] == 48
    short, decision = ask(server, long[:24], cache_salt="short")
    assert decision["rule"] == "kv_aware, short enough for decode alone"
    assert short["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert ask(server, long[:25], cache_salt="short")[1]["decode"][0]["worker"].startswith("decode/0@")


def test_nobody_overtakes_by_more_than_is_allowed(server: RunningServer) -> None:
    refused = server.http.post("/v1/completions", json={"prompt": [30], "max_tokens": 1, "priority": -11})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "priority")
    assert "-10 or a higher number" in refused.json()["error"]["message"]


def test_of_those_who_wait_the_most_urgent_goes_first(server: RunningServer) -> None:
    """vllm#9342. The one place is taken while they line up."""

    def queued() -> float:
        page = server.http.get("/metrics").text
        return sum(float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.startswith("relay_router_queued{"))

    def wait_for(priority: int) -> None:
        body = {"prompt": [30 + priority], "max_tokens": 40, "ignore_eos": True, "priority": priority}
        headers = {"X-Request-ID": f"priority.{priority}."}
        assert httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=300).status_code == 200

    holding = {"prompt": [9], "max_tokens": 1800, "ignore_eos": True, "stream": True}
    with (
        httpx.stream("POST", f"{server.url}/v1/completions", json=holding, timeout=300) as held,
        concurrent.futures.ThreadPoolExecutor(4) as pool,
    ):
        lines = held.iter_lines()
        next(lines)
        waiting = []
        for n, priority in enumerate((0, 5, -10), 1):
            waiting.append(pool.submit(wait_for, priority))
            until(lambda n=n: queued() == n, 120, server.log)
        held.close()
        for each in waiting:
            each.result()
    until(lambda: server.log().count('"client_request_id": "priority.') == 3, 120, server.log)
    assert re.findall(r'"client_request_id": "priority\.(-?\d+)\."', server.log()) == ["-10", "0", "5"]
