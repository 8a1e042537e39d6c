"""Pictures: one is made, and without matplotlib there is a clear word instead."""

import sys
from pathlib import Path

import pytest

from relay.bench.plot import plot, require_matplotlib
from relay.bench.report import Report
from relay.errors import StartError
from tests.bench.test_report import CONTEXT, RECORDS, measured


def test_a_picture_is_written(tmp_path: Path) -> None:
    path = tmp_path / "run.png"
    plot(Report(CONTEXT, measured()), RECORDS, path)
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG")
    assert len(data) > 20_000


def test_a_run_in_which_all_failed_has_a_picture_too(tmp_path: Path) -> None:
    failed = [record for record in RECORDS if not record.ok]
    plot(Report(CONTEXT, measured(failed)), failed, tmp_path / "run.svg")
    assert "</svg>" in (tmp_path / "run.svg").read_text()


def test_a_place_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="cannot be written"):
        plot(Report(CONTEXT, measured()), RECORDS, tmp_path / "none" / "run.png")


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(StartError, match=r"relayserve-pd\[bench\]"):
        require_matplotlib()
