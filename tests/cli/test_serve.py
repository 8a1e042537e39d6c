"""How `relay serve` begins and refuses: one clear line, no traceback."""

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.running import ROOT, changed_config


def serve(config: Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "relay", "serve", str(config), "--bind", "127.0.0.1:0"]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, **environment}, timeout=300, check=False)


def test_ctrl_c_while_it_imports_leaves_no_traceback() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "relay", "serve", "nowhere.yaml"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, cwd=ROOT) as process:
        assert process.stderr is not None
        fcntl.fcntl(process.stderr, fcntl.F_SETPIPE_SZ, 4096)  # what it writes of each import holds it up once nobody reads
        for line in process.stderr:
            if "click.core" in line:
                break
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
        assert process.wait(60) == -signal.SIGINT
    assert "Traceback" not in rest
    assert "KeyboardInterrupt" not in rest


def test_too_few_descriptors_are_refused_before_anything_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = changed_config(
        tmp_path, gateway={"max_connections": 100_000_000}, model={"source": "pypi:no-such-package==1/x.gguf", "sha256": None}
    )
    done = serve(config)
    assert done.returncode == 1
    assert "open files" in done.stderr
