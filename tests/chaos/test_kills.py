"""Real processes, real kills: what was running goes on with the same tokens or ends in a typed error, and nothing is lost."""

import json
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.running import RunningServer, until

PROMPT = "The history of bread begins"


class Stream:
    """One streamed completion, read on a thread."""

    def __init__(self, server: RunningServer, **more: Any) -> None:
        self.text, self.finish, self.error = "", "", ""
        self.n_events = 0
        self.done = self.broken = False
        self._url = f"{server.url}/v1/completions"
        self._body = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0, "stream": True, "ignore_eos": True, **more}
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        try:
            with httpx.stream("POST", self._url, json=self._body, timeout=300) as response:
                if response.status_code != 200:
                    self.error = response.read().decode()
                    return
                for line in response.iter_lines():
                    if line == "data: [DONE]":
                        self.done = True
                    elif line.startswith("data: "):
                        self._take(json.loads(line[6:]))
        except httpx.TransportError:
            self.broken = True

    def _take(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self.error = event["error"]["code"]
            return
        self.n_events += 1
        self.text += event["choices"][0]["text"]
        self.finish = event["choices"][0]["finish_reason"] or self.finish

    def join(self) -> "Stream":
        self._thread.join(180)
        assert not self._thread.is_alive()
        return self


@pytest.fixture(scope="module")
def undisturbed(server: RunningServer) -> dict[str, str]:
    """Greedy and seeded, with nothing killed."""
    streams = {"greedy": Stream(server).join(), "seeded": Stream(server, temperature=0.9, seed=3).join()}
    assert all(stream.done for stream in streams.values())
    return {name: stream.text for name, stream in streams.items()}


@pytest.fixture(autouse=True)
def _laws(server: RunningServer) -> Iterator[None]:
    yield
    until(lambda: server.http.get("/readyz").status_code == 200, 120, server.log)
    server.assert_blocks_come_back()
    assert server.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2}).status_code == 200


def workers(server: RunningServer, role: str) -> list[str]:
    return [name for name in server.pids() if name.startswith(role)]


@pytest.mark.parametrize("role", ["decode", "prefill", "router", "engine"])
@pytest.mark.parametrize("when", ["at once", "in the middle"])
def test_streams_survive_a_kill_with_the_same_tokens(server: RunningServer, undisturbed: dict[str, str], role: str, when: str) -> None:
    if not workers(server, role):
        return  # the other config has it
    name = workers(server, role)[0]
    before = server.pids()[name]
    streams = {"greedy": Stream(server), "seeded": Stream(server, temperature=0.9, seed=3)}
    if when == "in the middle":
        until(lambda: all(stream.n_events >= 5 for stream in streams.values()), 120)
    os.kill(before, signal.SIGKILL)
    for kind, stream in streams.items():
        stream.join()
        assert stream.error == "", server.log()[-3000:]
        assert stream.text == undisturbed[kind]
        assert stream.finish == "length"
        assert stream.done
    until(lambda: server.pids()[name] != before, 120)
    assert server.log().count(f"  {name:<12} ended: SIGKILL") >= 1


def test_a_hung_decode_worker_is_fenced_and_its_streams_go_on(server: RunningServer, undisturbed: dict[str, str]) -> None:
    role = "decode" if workers(server, "decode") else "engine"
    name = workers(server, role)[0]
    before = server.pids()[name]
    stream = Stream(server)
    until(lambda: stream.n_events >= 3, 120)
    os.kill(before, signal.SIGSTOP)
    assert stream.join().text == undisturbed["greedy"]
    assert stream.done
    assert server.pids()[name] != before


def test_a_killed_gateway_comes_back_on_the_same_socket(server: RunningServer) -> None:
    """litellm#40260: what was cut off is not taken for whole: its body has no end."""
    stream = Stream(server)
    until(lambda: stream.n_events >= 2, 120)
    before = server.pids()["gateway-0"]
    os.kill(before, signal.SIGKILL)
    stream.join()
    assert not stream.done
    assert stream.broken
    until(lambda: server.pids()["gateway-0"] != before, 120)
