"""How quiet the machine was: what others took of it while we measured, and whether a fixed piece of work takes as long as it should.

Others are every process that is not ours: /proc/stat's busy time of all cores, less what our own processes took. Steal is what the
hypervisor gave to other machines. The reference is a spin (integers, in cache) and a sweep (reading memory), run before and after each
measurement; its time is compared with the best of the whole session, and its own run delay says how long it waited for a core.
"""

import os
import time
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
_SPIN_STEPS: Final = 400_000
_SWEEP_BYTES: Final = 96 << 20  # more than a cache holds
_TRIES: Final = 3

MOST_OTHERS: Final = 0.05
MOST_STEAL: Final = 0.02
MOST_SLOWER: Final = 1.15
MOST_LOAD: Final = 1.5


class Reference(msgspec.Struct, frozen=True, kw_only=True):
    """Medians of a few tries. run_delay_share: of its wall time, how long it was ready and had no core."""

    spin_ms: float
    sweep_gb_per_s: float
    run_delay_share: float | None


class Jiffies(msgspec.Struct, frozen=True):
    """Seconds since boot, summed over all cores; `at_s` is the monotonic clock."""

    at_s: float
    busy_s: float
    steal_s: float


class Quietness(msgspec.Struct, frozen=True, kw_only=True):
    """Of one measurement. Shares are of all cores' time. `idle_peers_share`: servers of ours that were up and not asked. `reasons`: why it
    was not quiet; empty if it was."""

    load_before: float
    load_after: float
    others_share: float
    idle_peers_share: float
    steal_share: float
    before: Reference
    after: Reference
    reasons: list[str] = []

    @property
    def quiet(self) -> bool:
        return not self.reasons


class Sweep:
    """The reference work; holds the memory that is read."""

    def __init__(self) -> None:
        self._block = np.ones(_SWEEP_BYTES // 8)

    def measure(self) -> Reference:
        """Takes a tenth of a second or so."""
        began, delay = time.perf_counter(), _run_delay_ns()
        spins = sorted(_spin_ms() for _ in range(_TRIES))
        sweeps = sorted(self._sweep_gb_per_s() for _ in range(_TRIES))
        wall_s, after = time.perf_counter() - began, _run_delay_ns()
        share = None if delay is None or after is None else round((after - delay) / 1e9 / wall_s, 4)
        return Reference(spin_ms=round(spins[_TRIES // 2], 3), sweep_gb_per_s=round(sweeps[_TRIES // 2], 2), run_delay_share=share)

    def _sweep_gb_per_s(self) -> float:
        began = time.perf_counter()
        self._block.sum()
        return self._block.nbytes / (time.perf_counter() - began) / 1e9


def jiffies() -> Jiffies:
    """Now. Raises OSError where there is no /proc/stat."""
    return parse_jiffies(Path("/proc/stat").read_text(encoding="ascii"), time.monotonic())


def parse_jiffies(text: str, at_s: float) -> Jiffies:
    """The first line: user nice system idle iowait irq softirq steal; guests are in user and nice already."""
    user, nice, system, _, _, irq, softirq, steal = map(int, text.split("\n", 1)[0].split()[1:9])
    return Jiffies(at_s, (user + nice + system + irq + softirq) / _TICKS_PER_S, steal / _TICKS_PER_S)


def load_average() -> float:
    """Of the last minute."""
    return os.getloadavg()[0]


def judge(
    before: Jiffies,
    after: Jiffies,
    *,
    ours_s: float,
    idle_peers_s: float,
    cores: int,
    loads: tuple[float, float],
    references: tuple[Reference, Reference],
) -> Quietness:
    """ours_s: CPU time of all our processes between the two, those that idle included."""
    core_s = max(after.at_s - before.at_s, 1e-9) * cores
    return Quietness(
        load_before=round(loads[0], 2),
        load_after=round(loads[1], 2),
        others_share=round(max(0.0, after.busy_s - before.busy_s - ours_s) / core_s, 4),
        idle_peers_share=round(idle_peers_s / core_s, 4),
        steal_share=round((after.steal_s - before.steal_s) / core_s, 4),
        before=references[0],
        after=references[1],
    )


def with_reasons(found: Quietness, best_spin_ms: float, best_sweep_gb_per_s: float) -> Quietness:
    """What speaks against it, once the best reference of the session is known."""
    reasons = []
    if found.others_share > MOST_OTHERS:
        reasons.append(f"other processes took {found.others_share:.0%} of the cores")
    if found.steal_share > MOST_STEAL:
        reasons.append(f"the hypervisor stole {found.steal_share:.0%}")
    spin = max(found.before.spin_ms, found.after.spin_ms) / best_spin_ms
    if spin > MOST_SLOWER:
        reasons.append(f"the reference spin took {spin:.2f} times its best")
    sweep = best_sweep_gb_per_s / min(found.before.sweep_gb_per_s, found.after.sweep_gb_per_s)
    if sweep > MOST_SLOWER:
        reasons.append(f"reading memory took {sweep:.2f} times its best")
    return msgspec.structs.replace(found, reasons=reasons)


def _spin_ms() -> float:
    began = time.perf_counter()
    x = 1
    for _ in range(_SPIN_STEPS):
        x = x * 5 & 1023
    return (time.perf_counter() - began) * 1e3


def _run_delay_ns() -> int | None:
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return None
