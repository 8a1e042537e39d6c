"""Where the sockets of one running server lie: a 0700 directory, locked while its root lives, swept by the next root if that was killed."""

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from relay.errors import StartError

PREFIX = "relayserve-"


@contextmanager
def run_directory(parent: Path) -> Iterator[Path]:
    """A fresh directory, removed at the end; those of killed roots of this user, which nobody locks, are removed first. Raises
    StartError."""
    for path in sorted(parent.glob(f"{PREFIX}*")):
        _sweep(path)
    path, lock = _made(parent)
    try:
        yield path
    finally:
        os.close(lock)
        shutil.rmtree(path, ignore_errors=True)


def _made(parent: Path) -> tuple[Path, int]:
    """The directory, and the descriptor that holds its lock."""
    try:
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        try:
            lock = os.open(path / "new", os.O_WRONLY | os.O_CREAT)
            fcntl.flock(lock, fcntl.LOCK_EX)
            os.rename(path / "new", path / "lock")  # a directory that has a `lock` nobody holds is stale: it never appears unlocked
        except OSError:
            shutil.rmtree(path, ignore_errors=True)
            raise
    except OSError as error:
        why = error.strerror or error
        raise StartError(f"no directory for sockets can be made in {parent}: {why}; make room there, or set TMPDIR") from error
    return path, lock


def _sweep(path: Path) -> None:
    try:
        state = path.lstat()
        if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.geteuid():
            return
        with open(path / "lock", "r+b") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
    except (FileNotFoundError, BlockingIOError):
        return  # being made, being swept by another, or alive
