"""Malformed and damaged bodies over HTTP. `scripts/fuzz` does more of the same."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.http.fuzzing import fuzz, malformed, send, small_config
from tests.running import ROOT, RunningServer, running


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Iterator[RunningServer]:
    config = small_config(ROOT / "configs" / "quickstart.yaml", tmp_path_factory.mktemp("config") / "small.yaml")
    with running(config, tmp_path_factory.mktemp("fuzz")) as server:
        yield server


def test_every_malformed_request_is_refused_with_a_clear_message(server: RunningServer) -> None:
    rows = malformed()
    assert len(rows) >= 80
    for route, body in rows:
        assert 400 <= send(server.http, route, body) < 500, body[:500]


def test_damaged_bodies_are_served_or_refused(server: RunningServer) -> None:
    statuses = fuzz(server.http, range(250))
    assert statuses[400] > 100
    assert statuses[200] > 20
    assert "defect" not in server.log()
    assert all(pid == server.pids()[name] for name, pid in server.pids().items())
    assert server.log().count("worker_died") == 0


@pytest.mark.parametrize("given", [{}, {"max_tokens": None}, {"max_completion_tokens": None}])
def test_without_a_number_there_is_room_to_the_end_of_the_context(server: RunningServer, given: dict[str, Any]) -> None:
    """vllm#6707. Contexts of 64 tokens, and two by default where there is room for more."""
    for n_prompt, n_answer in ((40, 2), (63, 1)):
        body = {"prompt": [5] * n_prompt, "temperature": 0, "ignore_eos": True, **given}
        assert server.http.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == n_answer
    assert server.http.post("/v1/completions", json={"prompt": [5] * 64, **given}).status_code == 400


@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_that_waits_gets_comments_and_clients_pass_over_them(server: RunningServer, n: int) -> None:
    """From the prompt's computation on; the status is out by then, so what goes wrong later is an error event."""
    body: dict[str, Any] = {"model": "m", "prompt": [9] * 58, "max_tokens": 4, "temperature": 0, "n": n}
    text = server.http.post("/v1/completions", json={**body, "stream": True, "cache_salt": f"comments {n}"}).text
    assert text.startswith(": keep-alive\n\n")
    assert text.endswith("data: [DONE]\n\n")
    parts = text.split("\n\n")[:-1]
    assert all(part.startswith("data: ") or part == ": keep-alive" for part in parts)
    texts = [""] * n
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        for chunk in client.completions.create(**body, stream=True, extra_body={"cache_salt": f"again {n}"}):
            texts[chunk.choices[0].index] += chunk.choices[0].text
        assert texts == [choice.text for choice in client.completions.create(**body).choices]
