"""What a reader needs to know of the machine and the code to judge the figures."""

import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import msgspec


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """`commit` is the short one, with a word if files differ from it; `instructions`: what of a processor matters to such kernels."""

    date: str
    commit: str
    cores: int
    processor: str
    instructions: list[str]
    memory_gib: float
    huge_pages: str
    kernel: str
    python: str
    hypervisor: bool


_TELLING = ("avx2", "f16c", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_int8", "asimddp", "i8mm")


def facts(root: Path) -> Facts:
    """Of this machine, and of the work tree at `root`."""
    cpuinfo = _read("/proc/cpuinfo")
    flags = _field(cpuinfo, "flags").split() or _field(cpuinfo, "Features").split()
    return Facts(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        commit=commit(root),
        cores=os.cpu_count() or 1,
        processor=_field(cpuinfo, "model name") or platform.machine(),
        instructions=[name for name in _TELLING if name in flags],
        memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        huge_pages=_chosen(_read("/sys/kernel/mm/transparent_hugepage/enabled")),
        kernel=platform.release(),
        python=platform.python_version(),
        hypervisor="hypervisor" in flags,
    )


def commit(root: Path) -> str:
    """As git says it, or that there is no git."""
    try:
        short = _git(root, "rev-parse", "--short", "HEAD").strip()
        changed = _git(root, "status", "--porcelain", "--untracked-files=no").strip()
    except (OSError, subprocess.CalledProcessError):
        return "no git"
    return f"{short} with local changes" if changed else short


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def _field(text: str, name: str) -> str:
    """The first `name : value` line's value."""
    return next((line.partition(":")[2].strip() for line in text.splitlines() if line.partition(":")[0].strip() == name), "")


def _chosen(text: str) -> str:
    """`always [madvise] never` -> madvise."""
    return text.partition("[")[2].partition("]")[0] or "unknown"
