"""A server that dies is lost, and the rounds go on."""

import subprocess
import sys
from pathlib import Path

from relay.bench.peers.loads import LOADS
from relay.bench.peers.rounds import play
from relay.bench.peers.server import Server


def test_a_server_that_has_died_is_named_and_asked_no_more(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    server = Server(key="x", name="X", version="1", command=[], url="http://127.0.0.1:9")
    told: list[tuple[str, str]] = []
    assert list(play({"x": (server, process)}, LOADS, range(2), tmp_path, lambda *words: told.append(words))) == []
    assert [key for key, _ in told] == ["x"]
    assert "it ended under load; `relay bench` gave no report of X, warm-up" in told[0][1]
