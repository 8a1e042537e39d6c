"""What is started is ended, with all that it started itself."""

import re
import sys
from pathlib import Path

import pytest

from relay.bench.peers.server import Server, serving, session, started
from relay.errors import StartError

PARENT = """
import signal, subprocess, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); signal.pause()"
child = subprocess.Popen([sys.executable, "-c", deaf])
child.wait()
"""


def test_children_end_with_their_server_even_those_that_do_not_want_to(tmp_path: Path) -> None:
    with started([sys.executable, "-c", PARENT], tmp_path / "log") as process:
        while "up" not in (tmp_path / "log").read_text():
            assert process.poll() is None
        assert len(session(process.pid)) == 2
    assert session(process.pid) == {}


def test_cpu_time_of_a_session_is_counted(tmp_path: Path) -> None:
    with started([sys.executable, "-c", "while True: pass"], tmp_path / "log") as process:
        while session(process.pid)[process.pid] < 0.02:
            assert process.poll() is None


def test_a_server_that_ends_at_once_is_named_with_what_it_said(tmp_path: Path) -> None:
    server = Server(key="x", name="X", version="1", command=[sys.executable, "-c", "print('no such model')"], url="http://127.0.0.1:9")
    said = re.compile("X ended before it was ready.*no such model", re.DOTALL)
    with pytest.raises(StartError, match=said), serving(server, tmp_path / "log", 60.0):
        pass
