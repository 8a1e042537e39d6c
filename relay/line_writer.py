"""Log and console lines on their way out of a process, so that nobody who writes one ever waits for whoever reads them, or fails with them.

`LineWriter` is as much of a text file as structlog and rich need. Lines wait in a bounded queue for a thread that writes them. A pipe that
nobody reads, a full disk and a reader that has gone cost lines, which are counted, and nothing else. What a process says right before it is
killed may be lost with it; what it says before it exits is written first, if that takes no longer than a second.
"""

import atexit
import os
import select
import sys
import threading
from collections import deque
from typing import Final

_MOST_BYTES: Final = 1 << 20
_LAST_LINES_WITHIN_S: Final = 1.0


class LineWriter:
    """On the descriptor `fd`, which stays the caller's; None swallows everything. At most `most_bytes` wait."""

    encoding, errors = "utf-8", "replace"

    def __init__(self, fd: int | None, most_bytes: int = _MOST_BYTES) -> None:
        self._fd, self._most_bytes = fd, most_bytes
        self._lines: deque[bytes] = deque()
        self._n_bytes = self._n_lost = 0
        self._writing = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    @property
    def n_lost(self) -> int:
        """Lines that found no room or could not be written, since the last time that this was written among the others."""
        return self._n_lost

    def write(self, text: str) -> int:
        data = text.encode("utf-8", "replace")
        with self._changed:
            if self._fd is None or self._n_bytes + len(data) > self._most_bytes:
                self._n_lost += 1
            elif data:
                self._lines.append(data)
                self._n_bytes += len(data)
                self._changed.notify_all()
                self._start()
        return len(text)

    def flush(self) -> None:
        """What waits is written as soon as it can be."""

    def isatty(self) -> bool:
        return self._fd is not None and os.isatty(self._fd)

    def fileno(self) -> int:
        if self._fd is None:
            raise OSError("there is no file")
        return self._fd

    def finish(self, within_s: float = _LAST_LINES_WITHIN_S) -> None:
        """Return when everything is written, or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: not self._lines and not self._writing, within_s)

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="line-writer", daemon=True)
            self._thread.start()
            atexit.register(self.finish)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._lines)
                line = self._lines.popleft()
                self._n_bytes -= len(line)
                self._writing = True
                n_lost = self._n_lost
            if n_lost and self._put(b'{"event": "log_lines_lost", "n": %d, "level": "warning"}\n' % n_lost):
                with self._changed:
                    self._n_lost -= n_lost
            if not self._put(line):
                with self._changed:
                    self._n_lost += 1

    def _put(self, data: bytes) -> bool:
        """Whether it was written, whole. Takes as long as the reader takes."""
        assert self._fd is not None
        while data:
            try:
                data = data[os.write(self._fd, data) :]
            except BlockingIOError:  # whoever shares the descriptor made it so
                select.select([], [self._fd], [], 1.0)
            except OSError:
                return False
        return True


def standard_error() -> LineWriter:
    """Of this process; nothing where it was closed before we started, and its number may be somebody else's."""
    return LineWriter(None if sys.stderr is None else 2)


def standard_output() -> LineWriter:
    """As `standard_error`."""
    return LineWriter(None if sys.stdout is None else 1)
