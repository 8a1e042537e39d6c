"""Values at the ends of what the API accepts, and behind them: each request gets its one answer, and no worker dies of any."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.running import RunningServer, running

CONFIG = """
model: {source: "random:tiny-llama", name: tiny}
gateway: {bind: "127.0.0.1:0"}
engine: {kv_memory_mib: 16}
workers:
  - {name: prefill, roles: [prefill], threads: 1}
  - {name: decode, roles: [decode], threads: 1}
"""
BIG = (2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, -1, -(2**31), -(2**63))
SMALL = (0, 5e-324, 1e-308, 1e-45, 1e-38, 1e-7, 1.0, 1e300, -1e300)
NUMBERS = ("max_tokens", "min_tokens", "n", "best_of", "top_k", "seed", "priority", "logprobs", "timeout")
FRACTIONS = ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")
BODIES: dict[str, dict[str, Any]] = {
    **{f"{name} {value}": {name: value} for name in NUMBERS for value in BIG},
    **{f"{name} {value}": {name: value} for name in FRACTIONS for value in SMALL},
    **{f"stop_token_ids {value}": {"stop_token_ids": [value]} for value in BIG},
    **{f"prompt id {value}": {"prompt": [value]} for value in (0, *BIG)},
    **{f"logit_bias {value}": {"logit_bias": {str(value): 100}} for value in (0, *BIG)},
    "every bias, all the same way": {"logit_bias": {str(i): -100 for i in range(256)}},
    "many choices": {"n": 128, "max_tokens": 2},
    "many choices, scored": {"n": 16, "best_of": 16, "logprobs": 20, "max_tokens": 4},
    "many prompts": {"prompt": [[i % 200] for i in range(300)], "max_tokens": 1},
    "a long echo, scored": {"prompt": [i % 200 for i in range(1500)], "echo": True, "logprobs": 20, "max_tokens": 1},
    "an echo of nothing more": {"prompt": [1, 2, 3], "echo": True, "logprobs": 0, "max_tokens": 0},
    "an empty prompt": {"prompt": ""},
    "no prompts": {"prompt": []},
    "a prompt of no ids": {"prompt": [[]]},
    "a long salt": {"cache_salt": "s" * 100_000},
    "many stops": {"stop": ["x" * 1024] * 16},
    "never a stop": {"min_tokens": 30, "max_tokens": 30, "stop_token_ids": list(range(250))},
    "all penalties": {"repetition_penalty": 2.0, "frequency_penalty": -2, "presence_penalty": -2, "temperature": 2},
}
HEADERS: dict[str, dict[str, str]] = {
    "a deadline that has passed": {"X-Request-Timeout": "0.000001"},
    "a deadline that passes": {"X-Request-Timeout": "0.01"},
    "a deadline tomorrow": {"X-Request-Timeout": "86400"},
    "a long id": {"X-Request-ID": "i" * 128},
    "resumable": {"X-Relay-Resume": "true"},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("extremes")
    (folder / "tiny.yaml").write_text(CONFIG)
    with running(folder / "tiny.yaml", folder / "server") as server:
        yield server


@pytest.fixture(autouse=True)
def _nobody_died(server: RunningServer) -> Iterator[None]:
    yield
    dead = {row["worker"]: row["last_death"] for row in server.http.get("/admin/workers").json()["workers"] if row["epoch"] > 1}
    assert dead == {}


def assert_answered(response: httpx.Response, what: str) -> None:
    """Served, refused as the client's own fault, or out of time; a defect of ours is none of these."""
    assert response.status_code < 500 or response.status_code in (503, 504), (what, response.text)
    if response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream"):
        last = response.text.rstrip().rpartition("data: ")[2]
        code = "" if last == "[DONE]" else json.loads(last)["error"]["code"]
        assert code in ("", "poison_request", "deadline_exceeded", "overloaded", "context_length_exceeded"), what
    elif response.status_code != 200:
        assert response.json()["error"]["code"] not in ("internal_error", "worker_lost"), (what, response.text)


@pytest.mark.parametrize("stream", [False, True])
def test_no_value_of_a_field_ends_a_worker(server: RunningServer, stream: bool) -> None:
    for what, more in BODIES.items():
        body = {"prompt": [5, 6, 7], "max_tokens": 3, "stream": stream, **more}
        if stream and "best_of" in more:
            continue
        assert_answered(server.http.post("/v1/completions", content=json.dumps(body)), what)


@pytest.mark.parametrize("name", HEADERS)
def test_no_header_ends_a_worker(server: RunningServer, name: str) -> None:
    for n in (1, 8):
        body = {"prompt": [5, 6, 7], "max_tokens": 20, "stream": True, "n": n, "temperature": 1}
        assert_answered(server.http.post("/v1/completions", json=body, headers=HEADERS[name]), name)


def test_all_that_was_leased_comes_back(server: RunningServer) -> None:
    server.assert_blocks_come_back(60.0)
