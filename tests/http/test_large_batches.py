"""Requests of thousands of sequences, and requests whose time runs out before they have begun, on a server of its own."""

import json
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx
import pytest

from tests.running import RunningServer, changed_config, running

N_SEQUENCES = 1200


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("large-batches")
    config = changed_config(folder, model={"source": "random:tiny-llama", "sha256": None, "name": "tiny"}, router={"max_queue": 4})
    with running(config, folder / "run") as server:
        yield server


def test_more_sequences_than_may_wait_are_served_and_others_meanwhile(server: RunningServer) -> None:
    prompts = [[1, 2 + i % 100] for i in range(N_SEQUENCES)]
    finished = set()
    others = 0
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json={"prompt": prompts, "max_tokens": 1, "stream": True}, timeout=300
    ) as batch:
        assert batch.status_code == 200, batch.read()
        for line in batch.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            finished |= {choice["index"] for choice in event["choices"] if choice["finish_reason"]}
            if others < 3:  # while it runs
                other = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 2}, timeout=300)
                assert other.status_code == 200, other.text
                others += 1
    assert len(finished) == N_SEQUENCES
    server.assert_blocks_come_back()


def test_its_time_runs_out_while_a_client_sends_its_body(server: RunningServer) -> None:
    """It counts from the first byte: the limit of the body itself is a minute."""
    address = urlsplit(server.url)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Request-Timeout: 0.5\r\nContent-Length: 1000\r\n\r\n"
    with socket.create_connection((address.hostname or "", address.port or 0), timeout=100) as connection:
        connection.sendall(head + b'{"prompt": ')
        answer = connection.recv(65536)
    assert b" 504 " in answer.partition(b"\r\n")[0], answer
