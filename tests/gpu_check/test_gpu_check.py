"""`scripts/gpu_check` where there is no GPU: it says so; its format; and its sections rehearsed on the emulated device."""

import json
import re
import subprocess
from pathlib import Path

import pytest
import torch

from relay.gpu_check.__main__ import NO_GPU, WRONG, check, main, run_section, write
from relay.gpu_check.report import Found, Row, from_json, table
from tests.running import ROOT


def lines_of(text: str) -> list[list[str]]:
    return [re.split(r" {2,}", line) for line in text.splitlines()]


def read(path: Path) -> tuple[bool, list[Found]]:
    data = json.loads(path.read_text())
    return data["rehearsal"], [from_json(section) for section in data["sections"]]


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens where there is none: needs a machine without a GPU, as CI's are")
def test_without_a_gpu_it_says_so_and_exits_with_a_status_of_its_own(tmp_path: Path) -> None:
    place = tmp_path / "found.json"
    command = [str(ROOT / "scripts" / "gpu_check"), "--json", str(place)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == NO_GPU
    assert done.stdout == ""
    assert re.fullmatch(r"gpu_check: there is no GPU to check: .+\n", done.stderr)
    rehearsal, (device,) = read(place)
    assert not rehearsal
    assert (device.section, device.status, device.rows) == ("device", "skipped", [])


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens where there is none: needs a machine without a GPU, as CI's are")
def test_settings_that_no_gpu_can_be_had_with_hide_no_missing_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert main(["--json", str(tmp_path / "found.json")]) == NO_GPU


def test_settings_that_no_device_can_be_had_with_are_said_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert main(["--rehearse", "--json", str(tmp_path / "found.json")]) == 1
    assert re.fullmatch(r"gpu_check: the GPU cannot be checked: [^\n]*expandable_segments[^\n]*\n", capsys.readouterr().err)


def test_one_section_again_leaves_the_others_in_the_file(tmp_path: Path) -> None:
    place = tmp_path / "found.json"
    device, old = run_section("device", 60, "", rehearse=True), Found("sampling", "failed", 1.0, note="of yesterday")
    others = [Found("server", rows=[Row("a", ok=True)]), Found("kernels", rows=[Row("b", 1.5, "TB/s")])]
    write(place, [device, *others, old], True)
    assert check(["sampling"], place, "", rehearse=True) == 0
    _, found = read(place)
    assert [section.section for section in found] == ["device", "kernels", "sampling", "server"]
    assert (found[1], found[3]) == (others[1], others[0])
    assert found[2].status == "ok"
    assert found[2].rows


def test_nothing_is_added_to_a_file_of_another_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "found.json"
    write(place, [Found("device", note="NVIDIA H200"), Found("kernels", rows=[Row("b", 1.5, "TB/s")])], False)
    before = place.read_bytes()
    assert main(["--rehearse", "--only", "sampling", "--json", str(place)]) == WRONG
    assert re.fullmatch(
        r"gpu_check: --json \S+ has findings of NVIDIA H200, so nothing is added to it; name another\n", capsys.readouterr().err
    )
    assert place.read_bytes() == before
    place.write_text("notes of mine")
    assert main(["--rehearse", "--only", "sampling", "--json", str(place)]) == WRONG
    assert place.read_text() == "notes of mine"


def test_what_cannot_be_done_is_said_in_a_line_before_anything_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.whl").write_text("no archive")
    (tmp_path / "empty").mkdir()
    fine = str(tmp_path / "found.json")
    for arguments, what in (
        (["--json", str(tmp_path)], "--json .* cannot be written: Is a directory"),
        (["--json", str(tmp_path / "nowhere" / "found.json")], "--json .* cannot be written: No such file or directory"),
        (["--json", fine, "--wheels", str(tmp_path / "nope")], "--wheels .*nope: there is no folder with wheels in it"),
        (["--json", fine, "--wheels", str(tmp_path / "empty")], "--wheels .*empty: there is no folder with wheels in it"),
        (["--json", fine, "--wheels", str(tmp_path)], "--wheels .*: bad.whl cannot be unpacked: .*"),
    ):
        assert main(["--rehearse", *arguments]) == WRONG
        printed = capsys.readouterr()
        assert re.fullmatch(f"gpu_check: {what}\n", printed.err)
        assert printed.out == ""
    assert not Path(fine).exists()


def test_a_rehearsed_section_is_written_and_its_table_can_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "found.json"
    assert check(["graphs"], place, "", rehearse=True) == 0
    printed = capsys.readouterr().out
    rehearsal, found = read(place)
    assert rehearsal
    assert [section.section for section in found] == ["device", "graphs"]
    assert all(section.status == "ok" for section in found)
    assert table(found) in printed
    head, *rows = lines_of(table(found))
    assert head == ["section", "what", "value", "unit", "of floor", "target"]
    assert len(rows) == sum(len(section.rows) for section in found)
    assert all(row[0] == "graphs" and row[-1].startswith("ok") for row in rows[len(found[0].rows) :])
    assert re.search(r"^gpu_check: all right, \d+ s, ", printed.splitlines()[-1])


def test_what_must_hold_fails_a_section_and_a_missed_target_does_not() -> None:
    found = Found("speed")
    found.rate("copy", 2.0, "TB/s", most=4.0, target=3.3)
    found.time("step", 8.0, "ms", least=4.0, share=0.65, note="500 tokens/s")
    found.time("draws", 20.0, "us", most=30.0)
    assert found.close().status == "ok"
    assert [row.ok for row in found.rows] == [False, False, True]
    shown = lines_of(table([found]))
    assert shown[1] == ["speed", "copy", "2", "TB/s", "50 %", "3.3", "missed"]
    assert shown[2] == ["speed", "step", "8", "ms", "50 %", "0.65", "missed 500 tokens/s"]
    found.holds("bits", False, "error 1")
    assert found.close().status == "failed"
    assert lines_of(table([found]))[-1] == ["speed", "bits", "FAILED error 1"]
    assert from_json(json.loads(json.dumps(found.to_json()))) == found


def test_a_section_without_rows_has_a_line_that_says_why() -> None:
    shown = lines_of(table([Found("server", "skipped", note="not installed: trio"), Found("ipc", "failed", rows=[Row("a", ok=True)])]))
    assert shown[1] == ["server", "not installed: trio", "skipped"]
    assert shown[2][-1] == "failed"
    assert shown[3] == ["ipc", "a", "ok"]


def test_a_section_that_does_not_end_is_ended_and_one_that_dies_has_failed() -> None:
    late = run_section("kernels", 0.2, "", rehearse=True)
    assert late.status == "failed"
    assert "did not end" in late.note
    dead = run_section("no such section", 60, "", rehearse=True)
    assert dead.status == "failed"
    assert "invalid choice" in dead.note
