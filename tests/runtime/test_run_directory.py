"""The run directory: private, removed at the end, that of a killed root swept, that of a living one left alone."""

import fcntl
from pathlib import Path

import pytest

from relay.errors import StartError
from relay.runtime.run_directory import run_directory


def test_it_is_private_and_removed_however_it_ends(tmp_path: Path) -> None:
    def fail() -> None:
        with run_directory(tmp_path) as path:
            assert path.stat().st_mode & 0o777 == 0o700
            (path / "a.1.sock").touch()
            raise LookupError

    with pytest.raises(LookupError):
        fail()
    assert not list(tmp_path.iterdir())


def test_only_what_nobody_locks_is_swept(tmp_path: Path) -> None:
    stale, beginning, other = tmp_path / "relayserve-stale", tmp_path / "relayserve-beginning", tmp_path / "relayserve-file"
    stale.mkdir()
    (stale / "lock").touch()
    (stale / "a.1.sock").touch()
    beginning.mkdir()  # another root is making it: there is no lock yet
    other.touch()
    with run_directory(tmp_path) as first, run_directory(tmp_path) as second:
        assert sorted(tmp_path.iterdir()) == sorted([beginning, other, first, second])
        with open(first / "lock") as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_parent_that_takes_nothing_is_a_clear_refusal() -> None:
    with pytest.raises(StartError, match="no directory for sockets can be made in /proc: "), run_directory(Path("/proc")):
        pass
