"""What a server holds: taken before an attack and after it, and compared."""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from relay.chaos.server import ServerUnderTest, anonymous_bytes

MEMORY_MIB = 96.0  # that a process may have more than before: allocators keep what they had at their peak, in pieces
_FDS = 8
_LISTEN, _TIME_WAIT = "0A", "06"


@dataclass(frozen=True)
class Holding:
    """memory_mib, fds: by process, the root's and the workers'. connections: at the server's port, whatever their state."""

    memory_mib: dict[str, float]
    fds: dict[str, int]
    connections: int
    blocks: int
    strays: int
    zombies: int
    not_up: tuple[str, ...]


def look(server: ServerUnderTest) -> Holding:
    """Raises OSError while no gateway answers."""
    pids = {name: pid for name, pid in server.pids().items() if not name.startswith("spare")}
    return Holding(
        memory_mib={name: anonymous_bytes(pid) / (1 << 20) for name, pid in pids.items()},
        fds={name: _open_fds(pid) for name, pid in pids.items()},
        connections=_connections(urlsplit(server.url).port or 0),
        blocks=server.blocks_held(),
        strays=server.stray_processes(),
        zombies=server.zombies(),
        not_up=tuple(f"{name} is {row['state']}" for name, row in sorted(server.workers().items()) if row["state"] != "up"),
    )


def more_held(before: Holding, after: Holding) -> list[str]:
    """What did not come back, in words."""
    found = [f"worker {words}" for words in after.not_up]
    for name, mib in after.memory_mib.items():
        if mib > before.memory_mib.get(name, 0.0) + MEMORY_MIB:
            found.append(f"{name} has {mib:.0f} MiB, {before.memory_mib.get(name, 0.0):.0f} before")
    for name, n in after.fds.items():
        if n > before.fds.get(name, 0) + _FDS:
            found.append(f"{name} has {n} descriptors, {before.fds.get(name, 0)} before")
    for what, had, has in (
        ("connections", before.connections, after.connections),
        ("blocks held (-1: a pool does not add up)", 0, abs(after.blocks)),
        ("stray processes", 0, after.strays),
        ("zombies", 0, after.zombies),
    ):
        if has > had:
            found.append(f"{has} {what}, {had} before")
    return found


def settled(server: ServerUnderTest, before: Holding, within_s: float) -> tuple[Holding | None, list[str]]:
    """Look until nothing more is held than before, or time is up; with what is held then."""
    give_up, after, found = time.monotonic() + within_s, None, ["no gateway answers"]
    while found and time.monotonic() < give_up:
        try:
            after = look(server)
            found = more_held(before, after)
        except OSError:
            found = ["no gateway answers"]
        time.sleep(0.1 if found else 0.0)
    return after, found


def _open_fds(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return 0


def _connections(port: int) -> int:
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    rows = [line.split() for line in lines]
    return sum(row[1].endswith(f":{port:04X}") and row[3] not in (_LISTEN, _TIME_WAIT) for row in rows)
