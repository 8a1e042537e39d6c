"""The one clock: monotonic nanoseconds, comparable between processes of one host that share a boot and a time namespace.

`time.time()` is never used for a duration. Actors read `trio.current_time()` only to wait; stamps that enter a ledger come from `now_ns`.
"""

import os
import time
from pathlib import Path

now_ns = time.monotonic_ns


def clock_domain() -> str:
    """Identity of this clock: two processes may subtract each other's stamps only if their domains are equal."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot_id}:{os.stat('/proc/self/ns/time').st_ino}"
