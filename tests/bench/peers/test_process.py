"""What is started is ended, with all that it started itself."""

import re
import sys
from pathlib import Path

import pytest

from relay.bench.peers.process import Started, cpu_s, members, wait_until_ready
from relay.errors import StartError
from tests.bench.peers.readings import contestant

PARENT = """
import signal, subprocess, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); signal.pause()"
child = subprocess.Popen([sys.executable, "-c", deaf])
child.wait()
"""


def test_children_end_with_their_server_even_those_that_do_not_want_to(tmp_path: Path) -> None:
    with Started([sys.executable, "-c", PARENT], tmp_path / "log") as started:
        while "up" not in started.log():
            assert started.lives()
        pids = [member.pid for member in members(started.pid)]
        assert len(pids) == 2
    assert not started.lives()
    assert list(members(started.pid)) == []


def test_cpu_time_is_counted(tmp_path: Path) -> None:
    with Started([sys.executable, "-c", "while True: pass"], tmp_path / "log") as started:
        while cpu_s(started.pid) < 0.02:
            assert started.lives()
    assert cpu_s(started.pid) == 0.0


def test_a_server_that_ends_at_once_is_named_with_what_it_said(tmp_path: Path) -> None:
    said = re.compile("Server x ended before it was ready.*no such model", re.DOTALL)
    with Started([sys.executable, "-c", "print('no such model')"], tmp_path / "log") as started, pytest.raises(StartError, match=said):
        wait_until_ready(contestant("x", "llama"), started, 60.0)
