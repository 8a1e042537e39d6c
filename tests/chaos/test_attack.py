"""`scripts/attack` in small: a server of random weights under every attack; only how fast it answers is not judged here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from relay.chaos.attack.audit import Holding, more_held
from relay.chaos.attack.honest import is_later, percentile_99
from relay.chaos.attack.run import NAMES
from tests.running import ROOT, changed_config

POISON = 310  # of 320 token ids; no text has it


def attack(folder: Path, *options: str) -> dict[str, object]:
    tiny = {"source": "random:tiny-llama", "sha256": None, "name": "tiny"}
    config = changed_config(folder, model=tiny, engine={"kv_memory_mib": 16})
    command = [sys.executable, "-m", "relay.chaos.attack", str(config), "--longer", "500", "--no-ttft-rule", "--poison-token", str(POISON)]
    log = folder / "log"
    done = subprocess.run([*command, "--log", str(log), *options], cwd=ROOT, capture_output=True, timeout=580)
    lines = done.stdout.decode().splitlines()
    assert len(lines) == 1, done.stdout.decode() + done.stderr.decode()[-3000:]
    found: dict[str, object] = json.loads(lines[0])
    assert found["broke"] == [], log.read_text()[-6000:]
    assert (done.returncode, found["held"]) == (0, True)
    return found


def test_everything_holds_while_everybody_attacks(tmp_path: Path) -> None:
    found = attack(tmp_path, "--seconds", "20")
    rounds = found["rounds"]
    assert isinstance(rounds, dict)
    assert found["kills"]
    assert found["drains"]
    assert {*rounds} == {*NAMES}


def holding(**changed: object) -> Holding:
    usual = {"memory_mib": {"gateway-0": 80.0}, "fds": {"gateway-0": 40}, "connections": 4, "blocks": 0, "strays": 0, "zombies": 0}
    return Holding(**{**usual, "not_up": (), **changed})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"memory_mib": {"gateway-0": 400.0}}, "gateway-0 has 400 MiB, 80 before"),
        ({"fds": {"gateway-0": 77}}, "gateway-0 has 77 descriptors, 40 before"),
        ({"connections": 5}, "5 connections, 4 before"),
        ({"blocks": 3}, "3 blocks held"),
        ({"blocks": -1}, "1 blocks held (-1: a pool does not add up)"),
        ({"strays": 1}, "1 stray processes, 0 before"),
        ({"zombies": 1}, "1 zombies, 0 before"),
        ({"not_up": ("decode-0 is resting",)}, "worker decode-0 is resting"),
    ],
)
def test_whatever_does_not_come_back_is_named(changed: dict[str, object], words: str) -> None:
    assert more_held(holding(), holding()) == []
    found = more_held(holding(), holding(**changed))
    assert len(found) == 1
    assert words in found[0]


def test_a_late_first_token_or_two_are_chance_and_a_tenth_is_not() -> None:
    quiet = [10.0 + i / 10 for i in range(100)]
    assert percentile_99(quiet) == pytest.approx(19.9)
    assert not is_later(quiet, quiet)
    assert not is_later(quiet, [*quiet, 500.0, 500.0])
    assert not is_later(quiet, [59.0] * 100)
    assert is_later(quiet, [*quiet, *[61.0] * 10])
    assert not is_later([], [500.0] * 10)
    assert not is_later(quiet, [])
