"""One real server for all HTTP tests: the quickstart config."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.running import ROOT, RunningServer, running


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Iterator[RunningServer]:
    with running(ROOT / "configs" / "quickstart.yaml", tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture(autouse=True)
def _law_of_blocks(server: RunningServer) -> Iterator[None]:
    """Whatever a test did, every block comes back and no pool disagrees with itself."""
    yield
    server.assert_blocks_come_back()
