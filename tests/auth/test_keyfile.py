"""The key file on disk: changes are taken up, breakage is survived, loose modes are told."""

import fcntl
import threading
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from relay.auth.entry import Entry, with_entry
from relay.auth.keyfile import KeyFile, append, read_entries, warn_if_loose
from relay.auth.keys import hash_of
from relay.errors import ConfigError, Unauthorized


def entry(name: str) -> Entry:
    return Entry(name=name, sha256=hash_of(name.encode()))


def knows(file: KeyFile, name: str) -> bool:
    assert file.ring is not None
    try:
        return file.ring.find([name.encode()], 0.0).name == name
    except Unauthorized:
        return False


def looks(file: KeyFile) -> bool:
    """At the second it has stood."""
    return file.refresh() or file.refresh()


def test_a_change_is_taken_up_and_nothing_else_is_read(tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "keys.yaml")
    append(file.path, entry("a"))
    file.load()
    assert knows(file, "a")
    assert not looks(file)
    append(file.path, entry("b"))
    assert looks(file)
    assert knows(file, "a")
    assert knows(file, "b")
    file.path.write_text("")
    assert looks(file)
    assert not knows(file, "a")


def test_a_file_in_the_middle_of_being_written_is_not_taken_up(tmp_path: Path) -> None:
    """An editor that writes in place empties it first: for that moment there would be no keys."""
    file = KeyFile(tmp_path / "keys.yaml")
    append(file.path, entry("a"))
    file.load()
    text = file.path.read_text()
    file.path.write_text("")
    assert not file.refresh()
    file.path.write_text(text + "\n")
    assert not file.refresh()
    assert knows(file, "a")
    assert file.refresh()
    assert knows(file, "a")


def test_a_broken_or_missing_file_keeps_the_old_keys_and_is_told_once(tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "keys.yaml")
    append(file.path, entry("a"))
    file.load()
    with capture_logs() as logs:
        with file.path.open("a") as writer:
            writer.write("- {")
        assert not looks(file)
        assert not looks(file)
        file.path.unlink()
        assert not looks(file)
        assert not looks(file)
    assert [log["log_level"] for log in logs] == ["error", "error"]
    assert knows(file, "a")
    append(file.path, entry("c"))
    assert looks(file)
    assert not knows(file, "a")
    assert knows(file, "c")


def test_a_server_does_not_start_on_a_broken_file_and_a_replacement_lets_nobody_in(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    with pytest.raises(ConfigError, match="No such file"):
        KeyFile(path).start(must=True)
    path.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="not UTF-8"):
        KeyFile(path).start(must=True)
    file = KeyFile(path)
    with capture_logs():
        file.start(must=False)
    assert file.ring is None
    path.write_text("")
    append(path, entry("a"))
    assert looks(file)
    assert knows(file, "a")


def test_a_new_file_is_its_owners_alone_and_an_old_one_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    append(path, entry("a"))
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o640)
    append(path, entry("b"))
    assert path.stat().st_mode & 0o777 == 0o640
    assert [each.name for each in read_entries(path)] == ["a", "b"]


@pytest.mark.parametrize(("mode", "says"), [(0o600, ""), (0o640, ""), (0o644, "read the key file"), (0o660, "write the key file")])
def test_loose_modes_are_told(tmp_path: Path, mode: int, says: str) -> None:
    path = tmp_path / "keys.yaml"
    path.touch()
    path.chmod(mode)
    told: list[str] = []
    warn_if_loose(path, told.append)
    assert len(told) == bool(says)
    assert says in "".join(told)


def test_of_two_who_add_at_once_the_second_sees_what_the_first_wrote(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    append(path, entry("a"))
    refused: list[str] = []

    def add() -> None:
        try:
            append(path, entry("b"))
        except ConfigError as error:
            refused.append(str(error))

    thread = threading.Thread(target=add)
    with path.open("a") as first:
        fcntl.flock(first, fcntl.LOCK_EX)
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
        first.write(with_entry(path.read_text(), entry("b"), ""))
    thread.join()
    assert [each.name for each in read_entries(path)] == ["a", "b"]
    assert "two keys have the name `b`" in refused[0]


def test_a_folder_that_cannot_be_written_is_named() -> None:
    """Not even by root."""
    with pytest.raises(ConfigError, match="cannot be written"):
        append(Path("/proc/keys.yaml"), entry("a"))
