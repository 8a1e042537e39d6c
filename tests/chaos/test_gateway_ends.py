"""A gateway that has to end says so to its streams first, and its next life goes on with those that can be resumed."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from tests.chaos.test_recovery import Reader, all_up, processes
from tests.running import RunningServer, changed_config, running, until

BODY = {"prompt": "Once upon a time", "max_tokens": 300, "temperature": 0, "stream": True, "ignore_eos": True}
RESUME = {"X-Relay-Resume": "true"}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningServer]:
    tiny = {"source": "random:tiny-llama", "sha256": None, "name": "tiny"}
    (tmp_path / "config").mkdir()
    runtime = {"allow_faults": True, "drain_s": 2}
    config = changed_config(tmp_path / "config", model=tiny, engine={"kv_memory_mib": 16}, runtime=runtime)
    with running(config, tmp_path / "server") as server:
        yield server


def arm(server: RunningServer, **fault: str | float) -> None:
    assert server.http.post("/admin/faults", content=json.dumps(fault)).status_code == 202


def goes_on(server: RunningServer, reader: Reader) -> Reader:
    """Read by whichever gateway is there when one is."""
    found: list[Reader] = []

    def is_there() -> bool:
        url = f"{server.url}/v1/requests/{reader.stream_id}/stream"
        rest = Reader(url, method="GET", headers={**RESUME, "Last-Event-ID": reader.last_id}).join()
        found.append(rest)
        return rest.status == 200

    until(is_there, 60, server.log)
    return found[-1]


@pytest.mark.parametrize("end", ["an actor fails", "the drain's limit"])
def test_streams_end_in_an_event_and_the_resumable_one_goes_on(server: RunningServer, end: str) -> None:
    url = f"{server.url}/v1/completions"
    whole = Reader(url, body=BODY).join()
    assert whole.done
    arm(server, worker="decode-0", point="step", action="slow", seconds=0.05)  # so that none is finished by itself
    resumable = Reader(url, body=BODY, headers=RESUME)
    others = [Reader(url, body={**BODY, "prompt": f"Number {n}"}) for n in range(3)]
    with ThreadPoolExecutor() as pool:
        wholes = [pool.submit(httpx.post, url, json={**BODY, "stream": False, "prompt": f"Word {n}"}, timeout=120) for n in range(3)]
        _end(server, end, resumable, others)
    for answer in wholes:
        assert answer.result().status_code == 503
    until(lambda: _up_again(server), 60, server.log)
    arm(server, worker="decode-0", point="step", action="slow", seconds=0)
    rest = goes_on(server, resumable)
    assert rest.done, rest.error
    assert resumable.text + rest.text == whole.text
    until(lambda: all_up(server), 60, server.log)
    server.assert_blocks_come_back()


def _end(server: RunningServer, end: str, resumable: Reader, others: list[Reader]) -> None:
    until(lambda: in_flight(server) == 1 + 2 * len(others), 60)
    until(lambda: all(reader.n_events >= 3 for reader in (resumable, *others)), 60)
    if end == "an actor fails":
        fault = {"worker": "gateway-0", "point": "message:Tokens", "action": "raise"}
        with suppress(httpx.TransportError):  # it may be too late to answer
            server.http.post("/admin/faults", content=json.dumps(fault))
    else:
        assert server.http.post("/admin/workers/gateway-0/drain").status_code == 202
    for reader in (resumable, *others):
        reader.join()
        assert not reader.done
        assert reader.error["code"] == ("worker_lost" if end == "an actor fails" else "draining"), server.log()


def in_flight(server: RunningServer) -> int:
    found = re.search(r"^relay_requests_in_flight{[^}]*} (\S+)$", server.http.get("/metrics").text, re.MULTILINE)
    assert found
    return int(float(found[1]))


def _up_again(server: RunningServer) -> bool:
    try:
        return any(row["worker"] == "gateway-0" and row["epoch"] == 2 and row["state"] == "up" for row in processes(server))
    except httpx.TransportError:
        return False
