"""All that was measured, as one object: scripts/measured/peers-DATE.json. Paths of the machine are written as `$CACHE` and the like."""

import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import msgspec

from relay.bench.peers.loads import LOADS
from relay.bench.peers.rounds import Reading
from relay.bench.peers.server import Server
from relay.bench.peers.verdict import judge, middle
from relay.errors import StartError

_TELLING: Final = ("avx2", "f16c", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_int8", "asimddp", "i8mm")


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """`commit` says if files differ from it; `instructions`: what of a processor matters to such kernels."""

    date: str
    commit: str
    cores: int
    processor: str
    instructions: list[str]
    memory_gib: float
    kernel: str
    python: str


class Record(msgspec.Struct, kw_only=True):
    """`absent`: why a server that was asked for took no part. `readings` grow; a record that was cut short is one of fewer rounds."""

    facts: Facts
    model: str
    threads: int
    servers: list[Server] = []
    absent: dict[str, str] = {}
    readings: list[Reading] = []

    def to_json(self) -> bytes:
        """Indented; with medians and verdicts, which follow from the readings."""
        medians: dict[str, Any] = {
            server.key: {
                f"{load.key}.{figure.key}": middle(self.readings, server.key, load.key, figure.key)
                for load in LOADS
                for figure in load.figures
            }
            for server in self.servers
        }
        body = {**msgspec.to_builtins(self), "medians": medians, "verdicts": msgspec.to_builtins(judge(self.readings))}
        return msgspec.json.format(msgspec.json.encode(body), indent=1) + b"\n"


def read_record(path: Path, new: Record) -> Record:
    """One to go on with. Raises StartError if it was measured otherwise than `new` would be."""
    try:
        old = msgspec.json.decode(path.read_bytes(), type=Record)
    except (OSError, msgspec.DecodeError) as error:
        raise StartError(f"{path} cannot be gone on with: {error}") from error
    for name, then, now in (
        ("commit", old.facts.commit, new.facts.commit),
        ("processor", old.facts.processor, new.facts.processor),
        ("model", old.model, new.model),
        ("number of threads", old.threads, new.threads),
    ):
        if then != now:
            raise StartError(f"{path} cannot be gone on with: its {name} is {then}, and is now {now}")
    return old


def hide(text: str, names: Mapping[str, str]) -> str:
    """`text` with each path replaced by what stands for it, the longest first."""
    for path in sorted(names, key=len, reverse=True):
        text = text.replace(path, names[path])
    return text


def facts(root: Path) -> Facts:
    """Of this machine, and of the work tree at `root`."""
    cpuinfo = Path("/proc/cpuinfo").read_text(errors="replace")
    flags = _field(cpuinfo, "flags").split() or _field(cpuinfo, "Features").split()
    return Facts(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        commit=_commit(root),
        cores=os.cpu_count() or 1,
        processor=_field(cpuinfo, "model name") or platform.machine(),
        instructions=[name for name in _TELLING if name in flags],
        memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        kernel=platform.release(),
        python=platform.python_version(),
    )


def _commit(root: Path) -> str:
    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short", "HEAD") + (" with local changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "no git"


def _field(text: str, name: str) -> str:
    """The first `name : value` line's value."""
    return next((line.partition(":")[2].strip() for line in text.splitlines() if line.partition(":")[0].strip() == name), "")
