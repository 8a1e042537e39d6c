"""`relay chaos` in small: the kill table itself, on real processes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.running import ROOT


@pytest.mark.parametrize("config", ["quickstart"])
def test_the_kill_table_shows_nothing_lost(config: str, smollm2_path: Path) -> None:
    command = [sys.executable, "-m", "relay", "chaos", f"configs/{config}.yaml", "--json", "--tokens", "48", "--every", "0.2:0.8"]
    plans = "kill-decode,kill-9,kill-router,corrupt-push,cut-link"
    done = subprocess.run([*command, "--plan", plans, "--requests", "40", "--concurrency", "8"], cwd=ROOT, capture_output=True, timeout=580)
    assert done.returncode == 0, done.stdout.decode() + done.stderr.decode()[-2000:]
    rows = json.loads(done.stdout)["rows"]
    assert [row["plan"] for row in rows] == plans.split(",")
    for row in rows:
        assert (row["requests"], row["identical"]) == (40, 40)
        assert row["failed"] == row["tokens_lost"] == row["tokens_repeated"] == row["blocks_leaked"] == row["processes_leaked"] == 0
        assert row["recovery_ms_p50"] >= 0
        assert row["client_gap_ms_max"] > 0
        assert row["strikes"] > 0


def test_a_plan_that_is_none_is_refused_in_one_line() -> None:
    command = [sys.executable, "-m", "relay", "chaos", "configs/quickstart.yaml", "--plan", "kill-everything"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=60)
    assert done.returncode == 1
    assert "expected some of none, kill-decode" in done.stderr.decode()
    assert "Traceback" not in done.stderr.decode()
