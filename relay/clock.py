"""The one clock: monotonic nanoseconds, comparable between processes of one host that share a boot and a time namespace.

`time.time()` is never used for a duration. Actors read `trio.current_time()` only to wait; stamps that enter a ledger come from `now_ns`.
The simulation puts its own clock in the place of the host's.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_source: Callable[[], int] = time.monotonic_ns


def now_ns() -> int:
    return _source()


@contextmanager
def replaced(source: Callable[[], int]) -> Iterator[None]:
    """Inside, `now_ns` reads `source`, in this whole process."""
    global _source
    before, _source = _source, source
    try:
        yield
    finally:
        _source = before


def clock_domain() -> str:
    """Identity of this clock: two processes may subtract each other's stamps only if their domains are equal."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot_id}:{os.stat('/proc/self/ns/time').st_ino}"
