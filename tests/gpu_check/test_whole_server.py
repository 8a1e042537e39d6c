"""Section `server`: it serves with what is shipped, and sees what is compiled late, and which workers were lost."""

from pathlib import Path

import pytest

from relay import config
from relay.gpu_check.whole_server import CONFIGS, KINDS, Server, settings
from relay.kernels.emulator.compiler import binary
from relay.kernels.silu_mul import PROGRAMS


@pytest.mark.parametrize("kind", KINDS)
def test_it_runs_the_settings_that_are_shipped(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    shipped = config.load(CONFIGS / f"cuda-{kind}.yaml")
    ours = config.validate(settings(kind, rehearse=False), config.Config, kind)
    assert (ours.engine, ours.runtime, ours.workers) == (shipped.engine, shipped.runtime, shipped.workers)
    rehearsed = config.validate(settings(kind, rehearse=True), config.Config, kind)
    assert [worker.roles for worker in rehearsed.workers] == [worker.roles for worker in shipped.workers]


def test_what_is_compiled_once_it_is_ready_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    server = Server(1, tmp_path / "log", tmp_path)
    assert server.compiled_since() == []
    place = binary(PROGRAMS[0].path, PROGRAMS[:1], "plain")
    assert server.compiled_since() == [place.name]
    assert Server(1, tmp_path / "log", tmp_path).compiled_since() == []


def test_workers_that_ended_are_named(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("  decode-0     started, pid 7\n  decode-0     ended: its engine hangs\n  decode-0     started, pid 8\n")
    server = Server(1, log, tmp_path)
    assert server.lost() == ["decode-0     ended: its engine hangs"]
    assert server.pid("decode-0") == 8
