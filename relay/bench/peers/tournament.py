"""All rounds: every server is up, and one at a time is asked, in turn within each load: A B A B.

In: contestants. Out: readings, and the ledgers of our own. A server that is up and not asked takes next to nothing of the cores; what it
takes is in the quietness of every reading. Servers are up at once because a machine's speed drifts over minutes: the two runs of a pair
should be seconds apart.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import msgspec

from relay.bench.peers.contestant import Contestant
from relay.bench.peers.ours import process_names
from relay.bench.peers.pairing import Reading
from relay.bench.peers.process import SPIN, Started, cpu_s, members, wait_until_ready
from relay.bench.peers.quiet import MOST_OTHERS, Sweep, jiffies, judge, load_average, with_reasons
from relay.bench.peers.scenario import SCENARIOS, Scenario, seed_of
from relay.bench.peers.whereabouts import fetch_ledgers
from relay.errors import StartError

_READY_WITHIN_S: Final = {"ours": 180.0, "llama": 120.0, "vllm": 900.0}
_WITHIN_S: Final = 1800.0
_LOOK_S: Final = 0.5
_SELF: Final = "self"

Say = Callable[[str], None]


class Tournament:
    """A context: the servers are up while it is open. `absent` are those that did not start, and why."""

    def __init__(self, contestants: Sequence[Contestant], folder: Path, *, cores: int, wait_s: float, say: Say) -> None:
        """wait_s: how long a run waits for other processes to leave the cores, before it is made all the same."""
        self._asked, self._folder, self._cores, self._wait_s, self._say = contestants, folder, cores, wait_s, say
        self._stack = ExitStack()
        self._started: dict[str, Started] = {}
        self._sweep = Sweep()
        self.contestants: list[Contestant] = []
        self.absent: dict[str, str] = {}
        self.readings: list[Reading] = []
        self.ledgers: dict[tuple[str, str], list[dict[str, Any]]] = {}

    def __enter__(self) -> "Tournament":
        try:
            for contestant in self._asked:
                self._start(contestant)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def play(self, rounds: int, *, quick: bool, scenarios: Sequence[Scenario] = SCENARIOS) -> None:
        """Every load on every server, `rounds` times. Raises StartError if a server dies or a run fails."""
        for number in range(rounds):
            for scenario in scenarios:
                for contestant in self.contestants:
                    reading = self._measure(contestant, scenario, number, quick=quick)
                    self.readings.append(reading)
                    told = ", ".join(f"{name} {value:.1f}" for name, value in reading.figures.items())
                    self._say(f"round {number + 1}, {scenario.name}, {contestant.name}: {told}")

    def judged(self) -> list[Reading]:
        """The readings with what speaks against each, now that the best reference is known."""
        references = [r for reading in self.readings for r in (reading.quietness.before, reading.quietness.after)]
        if not references:
            return []
        spin, sweep = min(r.spin_ms for r in references), max(r.sweep_gb_per_s for r in references)
        return [msgspec.structs.replace(reading, quietness=with_reasons(reading.quietness, spin, sweep)) for reading in self.readings]

    def _start(self, contestant: Contestant) -> None:
        self._say(f"starting {contestant.name}")
        try:
            with ExitStack() as attempt:
                started = attempt.enter_context(Started(contestant.command, self._folder / f"{contestant.key}.log", contestant.environment))
                took_s = wait_until_ready(contestant, started, _READY_WITHIN_S[contestant.family])
                self._stack.push(attempt.pop_all())
        except (StartError, OSError) as error:
            self._say(f"{contestant.name} takes no part: {error}")
            self.absent[contestant.name] = str(error)
            return
        self._say(f"{contestant.name} is ready after {took_s:.1f} s")
        self._started[contestant.key] = started
        self.contestants.append(contestant)

    def _measure(self, contestant: Contestant, scenario: Scenario, number: int, *, quick: bool) -> Reading:
        self._wait_for_quiet()
        saved = self._folder / "requests.jsonl"
        saved.unlink(missing_ok=True)
        options = [*scenario.arguments(seed=seed_of(number, scenario), quick=quick), "--allow-failures", "--json"]
        command = [sys.executable, "-m", "relay", "bench", contestant.url, *options]
        loads, reference = load_average(), self._sweep.measure()
        with ExitStack() as stack:
            rivals = [stack.enter_context(Started(list(SPIN), self._folder / f"rival-{i}.log")) for i in range(scenario.competitors)]
            before, began = self._cpu(rivals), jiffies()
            report = _run_bench([*command, "--save-requests", str(saved)], self._folder / "bench.log")
            after, ended = self._cpu(rivals), jiffies()
        spent = {key: sum(after[key].values()) - sum(before[key].values()) for key in after}
        quietness = judge(
            began,
            ended,
            ours_s=sum(spent.values()),
            idle_peers_s=sum(seconds for key, seconds in spent.items() if key not in (contestant.key, _SELF)),
            cores=self._cores,
            loads=(loads, load_average()),
            references=(reference, self._sweep.measure()),
        )
        self._keep_ledgers(contestant, scenario, saved)
        return Reading(
            contestant=contestant.key,
            scenario=scenario.key,
            round_number=number,
            figures={figure.key: round(value, 4) for figure in scenario.figures if (value := figure.read(report)) is not None},
            failed=report["requests"]["failed"],
            short=report["requests"]["short"],
            cpu_s=self._by_process(contestant, before[contestant.key], after[contestant.key]),
            output_tokens=report["output_tokens"],
            saturated=report["generator"]["reason"],
            quietness=quietness,
            command=command,
        )

    def _cpu(self, rivals: Sequence[Started] = ()) -> dict[str, dict[int, float]]:
        """CPU seconds so far, by server and process; `self` is this process, what it has waited for, and the rivals."""
        found = {key: {member.pid: member.cpu_s for member in members(started.pid)} for key, started in self._started.items()}
        own = {pid: cpu_s(pid) for pid in (os.getpid(), *(rival.pid for rival in rivals))}
        return {**found, _SELF: own}

    def _by_process(self, contestant: Contestant, before: dict[int, float], after: dict[int, float]) -> dict[str, float]:
        """Of the run, by the name of the process where the server tells it."""
        started = self._started[contestant.key]
        names = process_names(started.log()) if contestant.family == "ours" else {}
        spent: dict[str, float] = {}
        for pid, seconds in after.items():
            name = names.get(pid, "root" if pid == started.pid else "others")
            spent[name] = round(spent.get(name, 0.0) + seconds - before.get(pid, 0.0), 3)
        return spent

    def _keep_ledgers(self, contestant: Contestant, scenario: Scenario, saved: Path) -> None:
        if contestant.family == "ours":
            ids = [json.loads(line)["request_id"] for line in saved.read_text().splitlines()]
            self.ledgers.setdefault((contestant.key, scenario.key), []).extend(fetch_ledgers(contestant.url, filter(None, ids)))

    def _wait_for_quiet(self) -> None:
        """Until other processes have left the cores for a moment, or for as long as was said."""
        deadline = time.monotonic() + self._wait_s
        while True:
            before, began = self._cpu(), jiffies()
            time.sleep(_LOOK_S)
            after, ended = self._cpu(), jiffies()
            ours_s = sum(sum(after[key].values()) - sum(before[key].values()) for key in after)
            others = (ended.busy_s - began.busy_s - ours_s) / ((ended.at_s - began.at_s) * self._cores)
            if others <= MOST_OTHERS or time.monotonic() > deadline:
                return


def _run_bench(command: list[str], log: Path) -> dict[str, Any]:
    """The report. Raises StartError if there is none."""
    with log.open("wb") as file:
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=file, timeout=_WITHIN_S, check=False)
        except subprocess.TimeoutExpired as error:
            raise StartError(f"`relay bench` did not end within {_WITHIN_S:.0f} s") from error
    try:
        report: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        raise StartError(f"`relay bench` ended with status {done.returncode}: {log.read_text(errors='replace')[-1000:]}") from None
    return report
