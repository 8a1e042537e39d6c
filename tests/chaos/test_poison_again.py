"""The same poison, sent again and again: workers die of the first one only, and whoever sends it is told not to try again."""

import concurrent.futures
import os
import re
import signal
from collections.abc import Iterator
from functools import partial

import httpx
import pytest

from tests.chaos.test_kills import Stream
from tests.chaos.test_too_often import has_been_ready
from tests.running import RunningServer, running, until

POISON = 77
CONFIG = f"""
model: {{source: "random:tiny-llama", name: tiny}}
gateway: {{bind: "127.0.0.1:0", workers: 2}}
engine: {{kv_memory_mib: 16}}
workers:
  - {{name: prefill, roles: [prefill], threads: 1}}
  - {{name: decode, roles: [decode], threads: 1}}
runtime: {{allow_faults: true, poison_token: {POISON}, first_backoff_s: 0}}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("poison")
    (folder / "tiny.yaml").write_text(CONFIG)
    with running(folder / "tiny.yaml", folder / "server") as server:
        yield server


def n_deaths(server: RunningServer) -> int:
    return len(re.findall("ended: SIGABRT", server.log()))


def send(server: RunningServer, prompt: list[int], seed: int = 1) -> httpx.Response:
    """On a connection of its own, which either gateway may take."""
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 1 + seed / 1000, "seed": seed}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=300)


def assert_refused(response: httpx.Response) -> None:
    assert (response.status_code, response.json()["error"]["code"]) == (422, "poison_request")
    assert response.headers["x-should-retry"] == "false"


def test_the_same_poison_twelve_times_kills_no_more_than_once(server: RunningServer) -> None:
    """In a step with others and then alone: two deaths, of the first. It killed as a prompt, so that another temperature is no excuse."""
    prompt = [5, POISON, 6]
    assert_refused(send(server, prompt))
    n = n_deaths(server)
    assert 1 <= n <= 2
    for seed in range(11):
        assert_refused(send(server, prompt, seed))
    assert n_deaths(server) == n
    assert send(server, [5, 6, 7]).status_code == 200


def test_several_clients_that_send_it_at_once_end_together(server: RunningServer) -> None:
    """And whoever sends something else meanwhile is answered."""
    prompt, before = [7, POISON, 8], n_deaths(server)
    bystander = Stream(server, prompt=[3, 4, 5], max_tokens=600, logit_bias={str(POISON): -100})
    until(lambda: bystander.n_events >= 1, 120)
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        for response in pool.map(lambda seed: send(server, prompt, seed), range(12)):
            assert_refused(response)
    assert bystander.join().error == ""
    assert bystander.done
    assert n_deaths(server) - before <= 6, "both gateways may have had some on the way when the first was convicted"


def test_neither_a_new_router_nor_a_new_gateway_has_forgotten(server: RunningServer) -> None:
    prompt = [9, POISON, 10]
    assert_refused(send(server, prompt))
    for name in ("router-0", "gateway-0", "gateway-1"):
        n_ready = server.log().count(f"  {name:<12} ready after")
        os.kill(server.pids()[name], signal.SIGKILL)
        until(partial(has_been_ready, server, name, n_ready + 1), 120, server.log)
        until(lambda: server.http.get("/readyz").status_code == 200, 120, server.log)
    n = n_deaths(server)
    for _ in range(6):
        assert_refused(send(server, prompt))
    assert n_deaths(server) == n
