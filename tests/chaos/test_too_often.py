"""A worker that dies too often rests while others serve its role; a server that has to end says so to every stream first."""

import os
import signal
from functools import partial
from pathlib import Path

import pytest

from tests.chaos.test_kills import Stream
from tests.running import RunningServer, running, until

CONFIG = """
model: {source: "random:tiny-llama", name: tiny}
gateway: {bind: "127.0.0.1:0"}
engine: {kv_memory_mib: 16}
workers:
  - {name: prefill, roles: [prefill], threads: 1}
  - {name: decode, roles: [decode], threads: 1}
runtime: {max_restarts: 2, first_backoff_s: 0, most_backoff_s: 60, within_s: 600}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(CONFIG)
    return path


def has_been_ready(server: RunningServer, name: str, times: int) -> bool:
    return server.log().count(f"  {name:<12} ready after") >= times


def strike(server: RunningServer, name: str, times: int) -> None:
    """kill -9 as soon as it is up again."""
    for n in range(times):
        until(partial(has_been_ready, server, name, n + 1), 120, server.log)
        os.kill(server.pids()[name], signal.SIGKILL)
    until(lambda: server.log().count(f"  {name:<12} ended: SIGKILL") == times, 120, server.log)


def long_streams(server: RunningServer) -> list[Stream]:
    """That end by no means of their own while the test runs."""
    streams = [Stream(server, prompt=[1 + n, 2, 3], max_tokens=1900) for n in range(3)]
    until(lambda: all(stream.n_events >= 1 for stream in streams), 120)
    return streams


def test_a_worker_that_dies_too_often_rests_and_the_others_serve(config: Path, tmp_path: Path) -> None:
    with running(config, tmp_path / "server") as server:
        strike(server, "prefill-0", 3)
        until(lambda: server.http.get("/readyz").json() == {"status": "ready", "resting": ["prefill-0"]}, 120, server.log)
        rows = {row["worker"]: row for row in server.http.get("/admin/workers").json()["workers"]}
        assert (rows["prefill-0"]["state"], rows["decode-0"]["state"]) == ("resting", "up")
        assert "died 3 times in 600 s" in server.log()
        for n in range(5):
            assert server.http.post("/v1/completions", json={"prompt": [5 + n] * 40, "max_tokens": 4}).status_code == 200
        errors = [line for line in server.log().splitlines() if '"worker_rests"' in line]
        assert ['"level": "error"' in line for line in errors] == [True]


def test_a_server_that_has_to_end_ends_its_streams_in_an_event_first(config: Path, tmp_path: Path) -> None:
    with running(config, tmp_path / "server") as server:
        strike(server, "router-0", 2)
        until(lambda: server.log().count("  router-0     ready after") == 3, 120, server.log)
        until(lambda: server.http.get("/readyz").status_code == 200, 120, server.log)
        streams = long_streams(server)
        os.kill(server.pids()["router-0"], signal.SIGKILL)
        assert [stream.join().error for stream in streams] == ["draining"] * 3
        assert not any(stream.broken for stream in streams)
        assert server.process.wait(180) == 1
        assert "\nrelay: worker router-0 died 3 times in 600 s" in server.log()


def test_a_second_signal_ends_streams_in_an_event(config: Path, tmp_path: Path) -> None:
    with running(config, tmp_path / "server") as server:
        streams = long_streams(server)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: "draining gateway-0" in server.log(), 120, server.log)
        server.process.send_signal(signal.SIGINT)
        assert [stream.join().error for stream in streams] == ["draining"] * 3
        assert not any(stream.broken for stream in streams)
        assert server.process.wait(180) == 0
