"""What was measured once is not measured again, in this life or the next."""

from pathlib import Path

from relay.engine.measured import Measured


def test_a_value_is_measured_once_for_all_lives(tmp_path: Path) -> None:
    path = tmp_path / "measured-a.json"
    first = Measured(path)
    assert [first.value("x", lambda: 1.5), first.value("x", lambda: 2.5), first.value("y", lambda: 3.5)] == [1.5, 1.5, 3.5]
    second = Measured(path)
    assert [second.value("x", lambda: 9.0), second.value("z", lambda: 4.5)] == [1.5, 4.5]
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_without_a_file_it_is_measured_by_each_life() -> None:
    assert [Measured().value("x", lambda: 1.0), Measured().value("x", lambda: 2.0)] == [1.0, 2.0]
