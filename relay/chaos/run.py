"""One row of the kill table: load at a fixed concurrency, strikes at random moments, and what came of every request."""

import random
import threading
import time
from collections.abc import Callable, Sequence
from statistics import median, quantiles

import msgspec

from relay.chaos.client import ChaosClient, Outcome
from relay.chaos.plan import PLANS
from relay.chaos.requests import Spec
from relay.chaos.server import ServerUnderTest

_BLOCKS_BACK_WITHIN_S = 120.0


class Row(msgspec.Struct, kw_only=True):
    """One plan's line. Recovery is the longest gap of each stream that needed another attempt or was resumed.

    failed: requests without a whole answer; identical: answers equal to the fault-free run's byte for byte, finish reasons and token counts
    included. restart_ms: medians of the parts of engine workers' restarts; `process` is all from the start to the news that it is ready
    that is not of the parts named beside it. blocks_leaked: blocks still held when nothing ran any more; processes_leaked: processes nobody
    knows of.
    """

    plan: str
    requests: int
    strikes: int
    failed: int
    tokens_lost: int
    tokens_repeated: int
    identical: int
    blocks_leaked: int
    processes_leaked: int
    recovery_ms_p50: float
    recovery_ms_p99: float
    client_gap_ms_max: float
    retried: int
    restart_ms: dict[str, float]
    failures: dict[str, int]


def reference(server: ServerUnderTest, specs: Sequence[Spec]) -> list[Outcome]:
    """Every request once, alone, with nothing struck. Raises AssertionError if one is not whole."""
    client = ChaosClient(server.url, resumable=False)
    outcomes = [client.ask(spec) for spec in specs]
    for outcome in outcomes:
        assert not outcome.failure, f"without faults `{outcome.kind}` failed: {outcome.failure}"
    return outcomes


def run_row(
    server: ServerUnderTest,
    plan: str,
    specs: Sequence[Spec],
    right: Sequence[Outcome],
    *,
    n_requests: int,
    concurrency: int,
    every_s: tuple[float, float],
    seed: int,
    on_progress: Callable[[int], None],
) -> Row:
    """`every_s`: between two strikes, drawn between these."""
    gateways_die = plan == "kill-gateway"
    usable = [i for i, spec in enumerate(specs) if spec.streams or not gateways_die]
    order = [usable[i % len(usable)] for i in range(n_requests)]
    random.Random(seed).shuffle(order)
    outcomes: list[tuple[int, Outcome]] = []
    lock = threading.Lock()
    waiting = iter(order)

    def load() -> None:
        client = ChaosClient(server.url, resumable=gateways_die)
        while True:
            with lock:
                index = next(waiting, None)
            if index is None:
                return
            outcome = client.ask(specs[index])
            with lock:
                outcomes.append((index, outcome))
                on_progress(len(outcomes))

    seen = server.log_size()
    threads = [threading.Thread(target=load, name=f"client-{i}") for i in range(concurrency)]
    for thread in threads:
        thread.start()
    strikes = _strike(server, plan, threads, random.Random(seed), every_s)
    for thread in threads:
        thread.join()
    _until(lambda: server.all_up(), _BLOCKS_BACK_WITHIN_S)
    return _judge(server, plan, specs, right, outcomes, strikes, _parts(server.restarts(seen)))


def _strike(
    server: ServerUnderTest, plan: str, threads: Sequence[threading.Thread], draw: random.Random, every_s: tuple[float, float]
) -> int:
    """While clients run: strike, wait until all is up again, wait a little, strike again. Returns how often."""
    strikes = 0
    while any(thread.is_alive() for thread in threads):
        time.sleep(draw.uniform(*every_s))
        if plan == "none" or not any(thread.is_alive() for thread in threads):
            continue
        try:
            PLANS[plan](server, draw)
            strikes += 1
        except OSError:
            pass  # the gateway that was asked is just dead, or what was to be struck is
        _until(lambda: server.all_up() or not any(thread.is_alive() for thread in threads), 60.0)
    return strikes


def _parts(restarts: Sequence[dict[str, float]]) -> dict[str, float]:
    """Medians by part."""
    return {part: round(median(restart[part] for restart in restarts), 1) for part in restarts[0]} if restarts else {}


def _judge(
    server: ServerUnderTest,
    plan: str,
    specs: Sequence[Spec],
    right: Sequence[Outcome],
    outcomes: Sequence[tuple[int, Outcome]],
    strikes: int,
    restart_ms: dict[str, float],
) -> Row:
    failures: dict[str, int] = {}
    lost = repeated = identical = retried = 0
    recoveries: list[float] = []
    for index, outcome in outcomes:
        if outcome.failure:
            failures[outcome.failure] = failures.get(outcome.failure, 0) + 1
        lost += max(0, right[index].n_tokens - outcome.n_tokens)
        repeated += max(0, outcome.n_tokens - right[index].n_tokens)
        identical += outcome.answer == right[index].answer
        if outcome.n_resumed or server.attempts(outcome.request_id) > 1:
            retried += 1
            recoveries.append(outcome.longest_gap_ms())
    _until(lambda: server.blocks_held() == 0, _BLOCKS_BACK_WITHIN_S)
    cuts = quantiles(recoveries, n=100) if len(recoveries) > 1 else recoveries * 99
    return Row(
        plan=plan,
        requests=len(outcomes),
        strikes=strikes,
        failed=sum(failures.values()),
        tokens_lost=lost,
        tokens_repeated=repeated,
        identical=identical,
        blocks_leaked=server.blocks_held(),
        processes_leaked=server.stray_processes(),
        recovery_ms_p50=round(cuts[49], 1) if cuts else 0.0,
        recovery_ms_p99=round(cuts[98], 1) if cuts else 0.0,
        client_gap_ms_max=round(max((outcome.longest_gap_ms() for _, outcome in outcomes), default=0.0), 1),
        retried=retried,
        restart_ms=restart_ms,
        failures=failures,
    )


def _until(holds: Callable[[], bool], within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            if holds():
                return
        except OSError:
            pass  # a gateway that is just dead answers nobody
        time.sleep(0.05)
