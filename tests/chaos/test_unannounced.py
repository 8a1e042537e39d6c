"""`kill -9` from outside, which nobody has announced: it is no proof against the request that was being computed, however well aimed."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from relay.engine.board import read_board
from tests.chaos.test_kills import Stream
from tests.chaos.test_recovery import all_up
from tests.running import RunningServer, changed_config, running, until

N_STREAMS = 6


@pytest.fixture(scope="module", params=["quickstart", "aggregated"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Iterator[RunningServer]:
    runtime = {"max_restarts": 1000, "first_backoff_s": 0.0}
    config = changed_config(tmp_path_factory.mktemp("config"), request.param, runtime=runtime)
    with running(config, tmp_path_factory.mktemp("unannounced")) as server:
        yield server


@pytest.fixture(scope="module")
def right(server: RunningServer) -> list[str]:
    """What each stream says when nobody is killed."""
    return [stream.join().text for stream in streams(server, "quiet")]


@pytest.fixture(autouse=True)
def _laws(server: RunningServer) -> Iterator[None]:
    yield
    until(lambda: server.http.get("/readyz").status_code == 200, 120, server.log)
    server.assert_blocks_come_back()


def streams(server: RunningServer, salt: str) -> list[Stream]:
    return [Stream(server, prompt=[504 + n + i for i in range(300)], cache_salt=f"{salt} {n}") for n in range(N_STREAMS)]


def on_trial(server: RunningServer) -> list[str]:
    """Workers that compute a suspect alone at this moment, by the step boards that the root holds."""
    found, folder = [], Path(f"/proc/{server.process.pid}/fd")
    for path in folder.iterdir():
        with suppress(OSError):  # one that was closed meanwhile
            name = os.readlink(path)
            if name.startswith("/memfd:relay-board-"):
                fd = os.open(path, os.O_RDONLY)
                try:
                    if read_board(fd)[1]:
                        found.append(name.removeprefix("/memfd:relay-board-").split()[0].rpartition("-")[0])
                finally:
                    os.close(fd)
    return found


def has_successor(server: RunningServer, name: str, pid: int) -> bool:
    return server.pids()[name] != pid


def engines(server: RunningServer) -> list[str]:
    return [name for name in server.pids() if name.startswith(("prefill", "decode", "engine"))]


def check(server: RunningServer, running: list[Stream], right: list[str]) -> None:
    for stream, text in zip(running, right, strict=True):
        stream.join()
        assert stream.error == "", server.log()[-3000:]
        assert stream.done
        assert stream.text == text


def test_two_kills_in_the_very_step_that_tries_a_suspect_end_no_stream(server: RunningServer, right: list[str]) -> None:
    """A kill between two steps makes no suspects, and a trial may be over before one looks: then it is done again."""
    n_struck = n_rounds = 0
    while n_struck < 2:
        assert n_rounds < 10, "nobody was tried"
        running, n_rounds = streams(server, f"aimed {n_rounds}"), n_rounds + 1
        until(lambda running=running: all(stream.n_events >= 3 for stream in running), 120)
        os.kill(server.pids()[engines(server)[-1]], signal.SIGKILL)
        while n_struck < 2 and not all(stream.done or stream.error or stream.broken for stream in running):
            for name in on_trial(server)[:1]:
                pid = server.pids()[name]
                os.kill(pid, signal.SIGKILL)
                n_struck += 1
                until(partial(has_successor, server, name, pid), 120, server.log)
        check(server, running, right)
        until(lambda: all_up(server), 120, server.log)


@pytest.mark.parametrize("gap_s", [0.05, 0.3, 0.8])
def test_a_kill_of_each_worker_in_turn_ends_no_stream(server: RunningServer, right: list[str], gap_s: float) -> None:
    running = streams(server, f"gap {gap_s}")
    until(lambda: all(stream.n_events >= 3 for stream in running), 120)
    for name in [*reversed(engines(server)), engines(server)[-1]]:
        with suppress(ProcessLookupError):  # killed already, and not back yet
            os.kill(server.pids()[name], signal.SIGKILL)
        time.sleep(gap_s)  # how the two fall together is the point; none of the assertions depends on it
    check(server, running, right)
