"""Hours in small: load, clients that leave, and a strike every so often, for as long as it is let. `python -m relay.chaos.soak`.

Every answer that was not left is compared with the fault-free one; memory is looked at each ten seconds while all workers are up.
"""

import argparse
import collections
import json
import random
import threading
import time
from pathlib import Path
from statistics import median

import click

from relay.chaos.client import ChaosClient
from relay.chaos.plan import PLANS
from relay.chaos.requests import specs
from relay.chaos.run import reference
from relay.chaos.server import ServerUnderTest

_LOOK_EVERY_S = 10.0
_LEAVES = 0.2  # share of requests whose client leaves


class Soak:
    """`plans` are struck in turn. Gateway kills are survived by resumable streams only, so every client opens such (see `ChaosClient`)."""

    def __init__(self, server: ServerUnderTest, tokens: int, plans: list[str], strike_s: float, seed: int) -> None:
        self._server, self._plans, self._strike_s, self._seed = server, plans, strike_s, seed
        self._specs = [spec for spec in specs(tokens) if spec.streams]
        self._right = reference(server, self._specs)
        self._lock = threading.Lock()
        self.counts: collections.Counter[str] = collections.Counter()
        self.failures: collections.Counter[str] = collections.Counter()
        self.memory_mib: list[float] = []

    def run(self, seconds: float, concurrency: int) -> None:
        until = time.monotonic() + seconds
        threads = [threading.Thread(target=self._load, args=(until, n)) for n in range(concurrency)]
        for thread in threads:
            thread.start()
        self._strike(until)
        for thread in threads:
            thread.join()

    def _load(self, until: float, number: int) -> None:
        draw, client = random.Random(f"{self._seed} {number}"), ChaosClient(self._server.url, resumable=True)
        while time.monotonic() < until:
            index = draw.randrange(len(self._specs))
            leave_after = draw.randint(1, 20) if draw.random() < _LEAVES else None
            outcome = client.ask(self._specs[index], leave_after=leave_after)
            with self._lock:
                self.counts["requests"] += 1
                if outcome.failure:
                    self.failures[outcome.failure] += 1
                elif outcome.left:
                    self.counts["left"] += 1
                elif outcome.answer == self._right[index].answer:
                    self.counts["identical"] += 1
                else:
                    self.counts["different"] += 1

    def _strike(self, until: float) -> None:
        draw = random.Random(self._seed)
        next_strike, turn = time.monotonic() + self._strike_s, 0
        while time.monotonic() < until:
            time.sleep(_LOOK_EVERY_S)
            if self._server.all_up():
                self.memory_mib.append(self._server.memory_bytes() / (1 << 20))
            if time.monotonic() >= next_strike:
                next_strike += self._strike_s
                try:
                    PLANS[self._plans[turn % len(self._plans)]](self._server, draw)
                except OSError:
                    continue  # the gateway that was asked is just dead
                turn += 1
                self.counts["strikes"] += 1


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/soak", description=__doc__)
    parser.add_argument("config", nargs="?", type=Path, default=Path("configs/quickstart.yaml"))
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=40, help="of each answer, at most")
    parser.add_argument("--strike-every", type=float, default=20.0, metavar="SECONDS")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with ServerUnderTest(args.config) as server:
        soak = Soak(server, args.tokens, list(PLANS), args.strike_every, args.seed)
        soak.run(60 * args.minutes, args.concurrency)
        give_up = time.monotonic() + 120
        while server.blocks_held() != 0 and time.monotonic() < give_up:
            time.sleep(0.1)
        quarter = max(1, len(soak.memory_mib) // 4)
        result = {
            "config": str(args.config),
            "minutes": args.minutes,
            "concurrency": args.concurrency,
            **{name: soak.counts[name] for name in ("requests", "identical", "left", "different", "strikes")},
            "failures": dict(soak.failures),
            "blocks_held": server.blocks_held(),
            "stray_processes": server.stray_processes(),
            "memory_mib_second_quarter": round(median(soak.memory_mib[quarter : 2 * quarter] or soak.memory_mib or [0.0]), 1),
            "memory_mib_last_quarter": round(median(soak.memory_mib[-quarter:] or [0.0]), 1),
        }
    click.echo(json.dumps(result))
    if soak.failures or soak.counts["different"] or result["blocks_held"] or result["stray_processes"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
