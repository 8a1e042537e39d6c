"""Where the sockets of one running server lie: a 0700 directory, locked while its root lives, swept by the next root if that was killed."""

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PREFIX = "relayserve-"


@contextmanager
def run_directory(parent: Path) -> Iterator[Path]:
    """A fresh directory, removed at the end; those of killed roots of this user, which nobody locks, are removed first."""
    for path in sorted(parent.glob(f"{PREFIX}*")):
        _sweep(path)
    path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    try:
        with open(path / "new", "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            os.rename(path / "new", path / "lock")  # a directory that has a `lock` nobody holds is stale: it never appears unlocked
            yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


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
