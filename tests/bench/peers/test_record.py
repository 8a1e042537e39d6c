"""What is kept of a session, and gone on with in another."""

import json
from pathlib import Path

import msgspec
import pytest

from relay.bench.peers.record import hide, read_record
from relay.errors import StartError
from tests.bench.peers.readings import FACTS, reading, record


def test_a_record_is_read_back_and_has_medians_and_verdicts(tmp_path: Path) -> None:
    one = record([reading("a16", "single", tpot=4.5), reading("llama", "single", tpot=9.5)])
    path = tmp_path / "peers.json"
    path.write_bytes(one.to_json())
    assert read_record(path, record([])) == one
    body = json.loads(path.read_text())
    assert body["medians"]["llama"]["single.tpot"] == 9.5
    assert [v["met"] for v in body["verdicts"] if v["figure"] == "tpot" and v["server"] == "a16"] == [True]


def test_a_record_of_another_commit_is_not_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "peers.json"
    path.write_bytes(record([]).to_json())
    new = record([])
    new.facts = msgspec.structs.replace(FACTS, commit="def5678")
    with pytest.raises(StartError, match="its commit is abc1234, and is now def5678"):
        read_record(path, new)


def test_paths_of_the_machine_are_hidden_the_longest_first() -> None:
    names = {"/home/u": "~", "/home/u/.cache/relayserve": "$CACHE"}
    assert hide("--model=/home/u/.cache/relayserve/x /home/u/y", names) == "--model=$CACHE/x ~/y"
