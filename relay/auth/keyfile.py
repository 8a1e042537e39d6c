"""The key file on disk: read at start, read again when it has changed, appended to by `relay keys new`."""

import fcntl
import os
import stat
from collections.abc import Callable
from pathlib import Path

import structlog

from relay.auth.entry import Entry, parse_entries, with_entry
from relay.auth.keys import KeyRing
from relay.errors import ConfigError

_State = tuple[int, ...] | str  # or why it cannot be looked at
log = structlog.get_logger()


class KeyFile:
    """`ring` is what the file said when it was last right; None if it never was, in this process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ring: KeyRing | None = None
        self._seen: _State = ()  # as it was when it was last taken up
        self._noticed: _State = ()  # as it was at the last look

    def start(self, *, must: bool) -> None:
        """The first reading. A server that starts needs it right: raises ConfigError. A gateway that is replaced while the file happens to
        be broken lets nobody in until it is right again, which is better than to die of it."""
        try:
            self.load()
        except ConfigError as error:
            if must:
                raise
            log.error("the key file is broken; nobody is let in", error=str(error))

    def load(self) -> None:
        """Read it now. Raises ConfigError; `ring` then stays what it was."""
        self._seen = self._noticed = _state(self.path)
        try:
            entries = read_entries(self.path)
            warn_if_loose(self.path, lambda text: log.warning(text, file=str(self.path)))
        except OSError as error:
            raise ConfigError(f"{self.path}: cannot be read: {error.strerror}") from error
        self.ring = KeyRing(entries)
        log.info("keys loaded", file=str(self.path), keys=len(entries))

    def refresh(self) -> bool:
        """Read it again if it has changed and has stood so for one look: who writes it in place empties it first, and an empty file is a
        right one. Whether it was read. What is wrong with it is logged once, and the old keys stay."""
        state = _state(self.path)
        stands, self._noticed = state == self._noticed, state
        if state == self._seen or not stands:
            return False
        try:
            self.load()
        except ConfigError as error:
            log.error("the key file is broken; what was read before stays in force", error=str(error))
            return False
        return True


def read_entries(path: Path) -> tuple[Entry, ...]:
    """Raises OSError, ConfigError."""
    try:
        return parse_entries(path.read_text(encoding="utf-8"), str(path))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8: {error}") from error


def append(path: Path, entry: Entry) -> None:
    """Add one, making the file (mode 0600) if there is none. In place, so that owner, mode and links stay. Raises ConfigError."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with open(fd, "r+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            text = file.read().decode()
            file.write(with_entry(text, entry, str(path)).encode())
            os.fsync(file)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8: {error}") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error


def warn_if_loose(path: Path, warn: Callable[[str], None]) -> None:
    """Who can write the file can let anyone in; who can read it learns who uses the server and how much."""
    mode = path.stat().st_mode
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        warn("others than its owner can write the key file, and so make keys; chmod 600 it")
    elif mode & stat.S_IROTH:
        warn("everyone on this machine can read the key file; chmod 600 it")


def _state(path: Path) -> _State:
    try:
        found = path.stat()
    except OSError as error:
        return error.strerror or "unknown"
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino, found.st_dev
