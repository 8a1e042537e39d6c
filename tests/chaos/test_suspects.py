"""A request that kills its worker each time is found among others and ends alone; one that was merely there is not convicted."""

import os
import re
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.chaos.test_kills import Stream
from tests.running import RunningServer, changed_config, running, until

POISON = 31_337


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Iterator[RunningServer]:
    runtime = {"allow_faults": True, "poison_token": POISON, "max_restarts": 1000, "first_backoff_s": 0.0}
    config = changed_config(tmp_path_factory.mktemp("config"), "aggregated", runtime=runtime)
    with running(config, tmp_path_factory.mktemp("suspects")) as server:
        yield server


@pytest.fixture(autouse=True)
def _laws(server: RunningServer) -> Iterator[None]:
    yield
    server.assert_blocks_come_back()


def arm(server: RunningServer, point: str, action: str) -> None:
    """A fault in the worker, once it is there to be told."""
    fault = {"worker": "engine-0", "point": point, "action": action}
    until(lambda: server.http.post("/admin/faults", json=fault).status_code == 202, 120, server.log)


def n_deaths(server: RunningServer) -> int:
    return len(re.findall("engine-0 +ended: SIGKILL", server.log()))


def test_the_request_that_kills_is_convicted_and_the_others_go_on(server: RunningServer) -> None:
    alone = Stream(server).join()
    before = server.pids()["engine-0"]
    others = [Stream(server) for _ in range(3)]
    until(lambda: all(other.n_events >= 3 for other in others), 120)
    poison = server.http.post("/v1/completions", json={"prompt": [504, POISON, 504], "max_tokens": 8})
    assert (poison.status_code, poison.json()["error"]["code"]) == (422, "poison_request")
    for other in others:
        assert other.join().error == ""
        assert other.done
        assert other.text == alone.text
    assert server.pids()["engine-0"] != before


@pytest.mark.parametrize("kind", ["armed", "from outside"])
def test_kills_of_a_test_that_are_announced_convict_nobody(server: RunningServer, kind: str) -> None:
    """The second falls into the step that the one suspect takes alone."""
    before = n_deaths(server)
    long = {"prompt": [504 + i for i in range(900)], "max_tokens": 150}  # it goes on until both have struck
    alone = Stream(server, **long).join()
    stream = Stream(server, **long, cache_salt=kind)
    for n in range(2):
        if kind == "armed":
            arm(server, "step", "kill")
        else:
            arm(server, "now", "announce")
            until(lambda: any(pool["free"] + pool["cached"] < pool["total"] for pool in server.kv().values()), 120)
            os.kill(server.pids()["engine-0"], signal.SIGKILL)
        until(partial(lambda wanted: n_deaths(server) == wanted, before + n + 1), 120)
    stream.join()
    assert stream.error == "", server.log()[-3000:]
    assert stream.text == alone.text
