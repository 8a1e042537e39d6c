"""Guesses on the real server: they come true where a text repeats itself, and nothing but time tells."""

import json
from typing import Any

from tests.running import RunningServer

SONG = "row, row, row your boat, gently down the stream, " * 6


def counted(server: RunningServer, name: str) -> float:
    """A counter of all workers."""
    lines = server.http.get("/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"relay_{name}_total"))


def events(server: RunningServer, **more: Any) -> list[dict[str, Any]]:
    body = {"model": "smollm2", "prompt": SONG, "max_tokens": 48, "temperature": 0, "ignore_eos": True, "stream": True, "logprobs": 1}
    response = server.http.post("/v1/completions", json={**body, "stream_options": {"include_usage": True}, **more})
    assert response.status_code == 200, response.text
    return [json.loads(part.removeprefix("data: ")) for part in response.text.split("\n\n")[:-2]]


def merged(parts: list[dict[str, Any]]) -> tuple[str, list[str], list[float], int]:
    """Text, tokens, log probabilities, tokens counted."""
    choices = [choice for part in parts for choice in part["choices"]]
    scores = [choice["logprobs"] for choice in choices if choice["logprobs"] is not None]
    tokens = [token for score in scores for token in score["tokens"]]
    text = "".join(choice["text"] for choice in choices)
    return text, tokens, [p for score in scores for p in score["token_logprobs"]], parts[-1]["usage"]["completion_tokens"]


def test_a_text_that_repeats_comes_in_fewer_steps_and_is_the_same(server: RunningServer) -> None:
    before, steps, drafted = (counted(server, name) for name in ("draft_tokens_accepted", "steps", "draft_tokens"))
    guessed = merged(events(server))
    accepted = counted(server, "draft_tokens_accepted") - before
    assert accepted > 10
    assert counted(server, "steps") - steps < 48
    assert accepted <= counted(server, "draft_tokens") - drafted < 3 * 48
    assert guessed[3] == len(guessed[1]) == 48

    before = counted(server, "draft_tokens")
    plain = merged(events(server, frequency_penalty=1e-30))  # changes no float32, but who is penalized is not guessed for
    assert counted(server, "draft_tokens") == before
    assert plain == guessed


def test_a_seed_draws_the_same_with_guesses_and_without(server: RunningServer) -> None:
    sampling = {"temperature": 0.4, "seed": 11}
    guessed = merged(events(server, **sampling))
    assert guessed == merged(events(server, **sampling, frequency_penalty=1e-30))


def test_the_ledger_of_guessed_tokens_adds_up(server: RunningServer) -> None:
    events(server)
    body = {"model": "smollm2", "prompt": SONG, "max_tokens": 48, "temperature": 0, "ignore_eos": True}
    server.http.post("/v1/completions", json=body, headers={"X-Request-ID": "guessed-ledger"})
    ledger = server.http.get("/v1/requests/guessed-ledger/ledger").json()
    assert ledger["completion_tokens"] == 48
    assert sum(ledger["spans"].values()) == ledger["wall_ns"]
