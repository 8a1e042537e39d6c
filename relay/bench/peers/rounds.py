"""Each load on each server in turn, round by round, and how quiet the machine was beside each run.

All servers are up and one at a time is asked, because a machine's speed drifts over minutes: runs that are compared should be seconds
apart. What the others take meanwhile counts as noise, like every process that is neither the server asked, nor its competitors, nor ours.
What a server still does after its last answer would count against the next one: so each run waits until the machine rests, and another
server begins each round.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from relay.bench.peers.loads import WARM_UP, Load, Report, seed_of
from relay.bench.peers.server import Process, Server, own_cpu_s, session, started
from relay.errors import StartError

MOST_OTHERS: Final = 0.05
MOST_STEAL: Final = 0.02
_WITHIN_S: Final = 1200.0
_LOOKS_FOR_S: Final = 0.5
_RESTS_WITHIN_S: Final = 15.0
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
_SPIN: Final = (sys.executable, "-c", "while True: pass")
Lost = Callable[[str, str], None]
_SWEPT: Final = np.ones(8 << 20)  # 64 MiB: more than a cache holds


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """One server under one load, once. `figures` by key; `load_average` and `memory_gb_per_s` are of just before.

    Of all cores' time, `others` is the share of processes that had no part in it, `steal` that of other machines. `cpu_us_per_token` is
    the server's; `generator` is not empty if the load was more than `relay bench` could make."""

    server: str
    load: str
    round_number: int
    figures: dict[str, float]
    failed: int
    short: int
    load_average: float
    memory_gb_per_s: float
    others: float
    steal: float
    cpu_us_per_token: float
    generator: str
    command: list[str]

    @property
    def quiet(self) -> bool:
        return self.others <= MOST_OTHERS and self.steal <= MOST_STEAL


class Spent(msgspec.Struct, frozen=True):
    """Seconds so far: the clock, all cores busy, stolen from them; ours, and the server's that is asked."""

    at_s: float
    busy_s: float
    steal_s: float
    ours_s: float
    server_s: float


def play(
    running: Mapping[str, tuple[Server, Process]], loads: Sequence[Load], numbers: Sequence[int], folder: Path, lost: Lost
) -> Iterator[Reading]:
    """Every load on every server for each round number; a server that dies is `lost`, and the others go on. Raises StartError else."""
    alive = dict(running)

    def asked(key: str, load: Load, number: int | None) -> Iterator[Reading]:
        server, process = alive[key]
        try:
            if number is None:
                ask(server, load, 0, folder)
            else:
                yield measure(server, process, load, number, folder)
        except StartError as error:
            if process.poll() is None:
                raise
            del alive[key]
            lost(key, f"it ended under load; {error}")

    for key in running:
        yield from asked(key, WARM_UP, None)
    for number in numbers:
        for load in loads:
            keys = list(alive)
            turn = number % max(1, len(keys))
            for key in keys[turn:] + keys[:turn]:
                yield from asked(key, load, number)


def measure(server: Server, process: Process, load: Load, number: int, folder: Path) -> Reading:
    """One run."""
    _rest()
    load_average, memory = os.getloadavg()[0], _memory_gb_per_s()
    with ExitStack() as stack:
        rivals = [stack.enter_context(started(_SPIN, folder / "rival.log")) for _ in range(load.competitors)]
        began = _spent(process, rivals)
        command, report = ask(server, load, seed_of(number, load), folder)
        ended = _spent(process, rivals)
    wall_s, server_s = ended.at_s - began.at_s, ended.server_s - began.server_s
    core_s = wall_s * (os.cpu_count() or 1)
    others_s = ended.busy_s - began.busy_s - (ended.ours_s - began.ours_s) - server_s
    return Reading(
        server=server.key,
        load=load.key,
        round_number=number,
        figures={figure.key: round(value, 3) for figure in load.figures if (value := figure.read(report)) is not None},
        failed=report["requests"]["failed"],
        short=report["requests"]["short"],
        load_average=round(load_average, 2),
        memory_gb_per_s=memory,
        others=round(max(0.0, others_s / core_s), 4),
        steal=round((ended.steal_s - began.steal_s) / core_s, 4),
        cpu_us_per_token=round(server_s * 1e6 / max(1, report["output_tokens"])),
        generator=report["generator"]["reason"],
        command=command,
    )


def ask(server: Server, load: Load, seed: int, folder: Path) -> tuple[list[str], Report]:
    """The command and its report. Raises StartError if there is none."""
    command = [sys.executable, "-m", "relay", "bench", server.url, *load.arguments(seed), "--allow-failures", "--json"]
    log = folder / "bench.log"
    with log.open("wb") as file:
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=file, timeout=_WITHIN_S, check=False)
            return command, json.loads(done.stdout)
        except (subprocess.TimeoutExpired, ValueError) as error:
            said = log.read_text(errors="replace")[-1000:]
            raise StartError(f"`relay bench` gave no report of {server.name}, {load.name}: {error}\n{said}") from error


def parse_stat(text: str) -> tuple[float, float]:
    """/proc/stat to seconds busy and stolen: user nice system idle iowait irq softirq steal; guests are in user and nice already."""
    user, nice, system, _, _, irq, softirq, steal = map(int, text.split("\n", 1)[0].split()[1:9])
    return (user + nice + system + irq + softirq) / _TICKS_PER_S, steal / _TICKS_PER_S


def _machine() -> tuple[float, float]:
    """Seconds busy and stolen so far."""
    return parse_stat(Path("/proc/stat").read_text(encoding="ascii"))


def _spent(process: Process, rivals: Sequence[Process]) -> Spent:
    busy_s, steal_s = _machine()
    ours_s = own_cpu_s() + sum(sum(session(rival.pid).values()) for rival in rivals)
    return Spent(time.monotonic(), busy_s, steal_s, ours_s, sum(session(process.pid).values()))


def _rest() -> None:
    """Return when others leave the cores alone, or after `_RESTS_WITHIN_S`."""
    give_up_s = time.monotonic() + _RESTS_WITHIN_S
    while time.monotonic() < give_up_s:
        began_s, (busy_s, _) = time.monotonic(), _machine()
        time.sleep(_LOOKS_FOR_S)
        core_s = (time.monotonic() - began_s) * (os.cpu_count() or 1)
        if _machine()[0] - busy_s <= MOST_OTHERS * core_s:
            return


def _memory_gb_per_s() -> float:
    """The best of three reads of one core."""
    times = []
    for _ in range(3):
        began = time.perf_counter()
        _SWEPT.sum()
        times.append(time.perf_counter() - began)
    return round(_SWEPT.nbytes / min(times) / 1e9, 2)
