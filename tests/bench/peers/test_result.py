"""What is written of a session."""

import json
import sys
from pathlib import Path

import pytest

from relay.bench.peers.picture import draw
from relay.bench.peers.result import Anonymous, free_stem
from tests.bench.peers.readings import contestant, reading, result


def test_paths_of_the_machine_are_taken_out_of_commands(tmp_path: Path) -> None:
    hide = Anonymous({"$CACHE": tmp_path / "cache", "$REPO": tmp_path})
    command = [sys.executable, f"--model={tmp_path}/cache/peers/x", f"{tmp_path}/configs/a.yaml", str(Path.home() / "x")]
    assert hide.command(command) == ["python", "--model=$CACHE/peers/x", "$REPO/configs/a.yaml", "$HOME/x"]
    assert hide.contestants([contestant("a16", "ours")])[0].command == ["serve", "a16"]


def test_a_second_record_of_a_day_does_not_overwrite_the_first(tmp_path: Path) -> None:
    assert free_stem(tmp_path, "2026-11-30").name == "peers-2026-11-30"
    (tmp_path / "peers-2026-11-30.png").touch()
    (tmp_path / "peers-2026-11-30-2.md").touch()
    assert free_stem(tmp_path, "2026-11-30").name == "peers-2026-11-30-3"


def test_the_object_is_json_with_every_reading() -> None:
    body = json.loads(result([reading("a16", "single", tpot=4.5)]).to_json())
    assert (body["schema"], body["readings"][0]["figures"], body["facts"]["cores"]) == (1, {"tpot": 4.5}, 2)


def test_a_picture_is_drawn_of_what_was_measured_and_of_nothing(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw(result([reading("a16", "single", tpot=4.5), reading("llama", "single", 0, "others", tpot=9.0)]), tmp_path / "some.png")
    draw(result([]), tmp_path / "none.png")
    assert (tmp_path / "some.png").read_bytes().startswith(b"\x89PNG")
