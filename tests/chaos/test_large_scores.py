"""Log probabilities that come in many frames, of prompts and answers: whole, and resumed after a decode worker's death and a gateway's."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest

from tests.running import RunningServer, running, until

CONFIG = """
model: {source: "random:tiny-llama", name: tiny}
gateway: {bind: 127.0.0.1:0, workers: 2}
engine: {kv_memory_mib: 32, max_running: 4}
workers:
  - {name: prefill, roles: [prefill], threads: 1}
  - {name: decode, roles: [decode], threads: 1}
"""
N_PROMPT, N_ANSWER = 1000, 1000
PROMPT = [20 + i * 7 % 200 for i in range(N_PROMPT)]
BODY: dict[str, Any] = {"prompt": PROMPT, "temperature": 0, "ignore_eos": True, "echo": True, "max_tokens": N_ANSWER, "stream": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    path = tmp_path_factory.mktemp("config") / "tiny.yaml"
    path.write_text(CONFIG)
    with running(path, tmp_path_factory.mktemp("scores")) as server:
        yield server
        server.assert_blocks_come_back()


class Told:
    """What a client has read: of choice 0 text, offsets and log probabilities, in order."""

    def __init__(self) -> None:
        self.text, self.last_id, self.stream_id = "", "", ""
        self.tokens: list[str] = []
        self.offsets: list[int] = []
        self.logprobs: list[float | None] = []
        self.tops: list[dict[str, float] | None] = []
        self.done = False
        self.error: dict[str, Any] = {}

    def read(self, server: RunningServer, *, resume: bool = False, on_event: Callable[[], None] = lambda: None, **body: Any) -> "Told":
        """Until the end."""
        headers = {"Last-Event-ID": self.last_id} if resume else {"X-Relay-Resume": "true"}
        method, path = ("GET", f"/v1/requests/{self.stream_id}/stream") if resume else ("POST", "/v1/completions")
        with httpx.stream(method, server.url + path, headers=headers, json=None if resume else {**BODY, **body}, timeout=300) as response:
            assert response.status_code == 200, response.read()
            self.stream_id = response.headers["x-relay-resume"]
            next_id = ""
            for line in response.iter_lines():
                if line.startswith("id: "):
                    next_id = line[4:]
                elif line == "":
                    self.last_id = next_id
                    on_event()
                elif line == "data: [DONE]":
                    self.done = True
                elif line.startswith("data: "):
                    self._take(json.loads(line[6:]))
        return self

    def _take(self, event: dict[str, Any]) -> None:
        self.error = event.get("error", self.error)
        for choice in event.get("choices", ()):
            self.text += choice["text"]
            if choice["logprobs"] is not None:
                self.tokens += choice["logprobs"]["tokens"]
                self.offsets += choice["logprobs"]["text_offset"]
                self.logprobs += choice["logprobs"]["token_logprobs"]
                self.tops += choice["logprobs"]["top_logprobs"] or []


@pytest.fixture(scope="module")
def quiet(server: RunningServer) -> Told:
    told = Told().read(server, logprobs=20)
    assert told.done, told.error
    return told


def kill(server: RunningServer, *kinds: str) -> None:
    rows = server.http.get("/admin/workers").json()["workers"]
    for row in rows:
        if row["worker"].startswith(kinds):
            os.kill(row["pid"], signal.SIGKILL)


def all_up(server: RunningServer) -> bool:
    try:
        rows = server.http.get("/admin/workers").json()["workers"]
        return {row["state"] for row in rows} == {"up"} and server.http.get("/readyz").status_code == 200
    except httpx.TransportError:
        return False


def test_scores_that_take_many_frames_are_whole_and_the_same_as_few(server: RunningServer, quiet: Told) -> None:
    assert len(quiet.tokens) == N_PROMPT + N_ANSWER
    assert len(quiet.tops) == len(quiet.tokens)
    few = Told().read(server, logprobs=0)
    assert few.logprobs == quiet.logprobs
    assert few.text == quiet.text
    assert [len(top) for top in quiet.tops[1:] if top is not None] == pytest.approx([20] * (len(quiet.tops) - 1), abs=1)


@pytest.mark.parametrize("kept", [True, False], ids=["behind the echo", "from the first event"])
def test_an_echo_with_scores_is_resumed_after_a_decode_workers_death_and_the_gateways(
    server: RunningServer, quiet: Told, kept: bool
) -> None:
    told, kills = Told(), ["decode-", "gateway-"]

    def on_event() -> None:
        if (kills == ["decode-", "gateway-"] and len(told.tokens) >= N_PROMPT) or (
            kills == ["gateway-"] and _retried(server, told.stream_id)
        ):
            kill(server, kills.pop(0))

    with suppress(httpx.TransportError):
        told.read(server, on_event=on_event, logprobs=20)
    assert (kills, told.done) == ([], False)
    until(lambda: all_up(server), 120, server.log)
    if not kept:  # a reader that has lost what it read, and begins anew
        stream_id, told = told.stream_id, Told()
        told.stream_id = stream_id
    told.read(server, resume=True)
    assert told.done, told.error
    assert told.text == quiet.text
    assert told.logprobs == quiet.logprobs
    assert told.offsets == quiet.offsets
    assert told.tops == quiet.tops


def _retried(server: RunningServer, request_id: str) -> bool:
    return any("attempt lost" in line and request_id in line for line in server.log().splitlines())
