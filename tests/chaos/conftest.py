"""A server of its own for each kind of config, since these tests kill parts of it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.running import ROOT, RunningServer, running


@pytest.fixture(scope="module", params=["quickstart", "aggregated"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Iterator[RunningServer]:
    with running(ROOT / "configs" / f"{request.param}.yaml", tmp_path_factory.mktemp(request.param)) as server:
        yield server
