"""How much memory this process and its children may have: the machine's, or less where a control group (a container) says so."""

import os
from pathlib import Path
from typing import Final

_UNLIMITED_V1: Final = 1 << 60  # version 1 says "no limit" by a number near 2**63


def memory_limit(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> tuple[int, str]:
    """Bytes, and in words whose they are."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = [(physical, "this machine has"), *((n, "this container may use") for n in _of_groups(root, own))]
    return min(limits)


def _of_groups(root: Path, own: Path) -> list[int]:
    """The limits of our control group and of all above it, version 2 and 1."""
    found = []
    try:
        lines = own.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            top, name = root, "memory.max"
        elif "memory" in controllers.split(","):
            top, name = root / "memory", "memory.limit_in_bytes"
        else:
            continue
        # inside a container its own group is often mounted at the top, whatever the path says
        folder = top / path.lstrip("/")
        for each in (folder, *folder.parents):
            found += _read(each / name)
            if each == top:
                break
    return found


def _read(path: Path) -> list[int]:
    try:
        text = path.read_text().strip()
    except OSError:
        return []
    return [int(text)] if text.isdigit() and int(text) < _UNLIMITED_V1 else []
