"""Malformed and damaged bodies over HTTP. `scripts/fuzz` does more of the same."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.http.fuzzing import fuzz, malformed, send, small_config
from tests.running import ROOT, RunningServer, running


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Iterator[RunningServer]:
    config = small_config(ROOT / "configs" / "quickstart.yaml", tmp_path_factory.mktemp("config") / "small.yaml")
    with running(config, tmp_path_factory.mktemp("fuzz")) as server:
        yield server


def test_every_malformed_request_is_refused_with_a_clear_message(server: RunningServer) -> None:
    rows = malformed()
    assert len(rows) >= 80
    for route, body in rows:
        assert 400 <= send(server.http, route, body) < 500, body[:500]


def test_damaged_bodies_are_served_or_refused(server: RunningServer) -> None:
    statuses = fuzz(server.http, range(250))
    assert statuses[400] > 100
    assert "defect" not in server.log()
    assert all(pid == server.pids()[name] for name, pid in server.pids().items())
    assert server.log().count("worker_died") == 0
