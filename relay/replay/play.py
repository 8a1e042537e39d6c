"""One load on one cluster, from the first arrival to the last answer, into figures."""

from collections.abc import Sequence

import msgspec
import trio

from relay.actors.gateway import Bell, Flight
from relay.bench.statistic import Distribution, distribution
from relay.clock import now_ns
from relay.ledger.ledger import Ledger
from relay.messages import Sampling, Stopping
from relay.replay.cluster import Cluster, Setup
from relay.replay.load import Visit
from relay.simulation import scheduler

_GREEDY = Sampling(temperature=0.0)


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """hit_rate: of the prompt tokens of answered requests, those found in a cache. computed, busy: by worker, prompt tokens and the share
    of `span_s`, first arrival to last answer, that it spent in steps. local: requests whose prompt a decode worker computed by itself.
    """

    n_requests: int
    n_failed: int
    n_prompt: int
    hit_rate: float
    ttft_ms: Distribution | None
    tpot_ms: Distribution | None
    span_s: float
    computed: dict[str, int]
    busy: dict[str, float]
    local: int
    n_preempted: int

    @property
    def busiest_prefill(self) -> float:
        """Its share of what all prefill workers have computed."""
        of_prefill = [n for name, n in self.computed.items() if name.startswith("prefill")]
        return max(of_prefill) / max(1, sum(of_prefill))

    def mean_busy(self, role: str) -> float:
        """Of the workers of one role."""
        shares = [share for name, share in self.busy.items() if name.startswith(role)]
        return sum(shares) / len(shares)


class _Play:
    def __init__(self, setup: Setup, visits: Sequence[Visit]) -> None:
        self._cluster, self._visits = Cluster(setup), visits
        self._ttft_ms: list[float] = []
        self._tpot_ms: list[float] = []
        self._n_prompt = self._n_cached = self._n_failed = self._local = 0

    async def run(self) -> Figures:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._cluster.run)
            while not self._cluster.router.ready():
                await trio.sleep(0.01)
            began_s = trio.current_time()
            async with trio.open_nursery() as clients:
                for i, visit in enumerate(self._visits):
                    await trio.sleep_until(began_s + visit.at_s)
                    clients.start_soon(self._client, f"r{i}", visit)
            span_s = trio.current_time() - began_s
            nursery.cancel_scope.cancel()
        if self._cluster.n_violations:
            raise AssertionError(f"the gateway counts {self._cluster.n_violations} violations")
        return self._figures(span_s)

    async def _client(self, name: str, visit: Visit) -> None:
        bell, began_ns = Bell(), now_ns()
        stopping = Stopping(max_tokens=visit.n_answer)
        flight = Flight(name, visit.prompt, _GREEDY, stopping, Ledger(began_ns), bell)
        self._cluster.gateway.submit(flight)
        while not flight.ended:
            await bell.wait()
        if flight.error is not None:
            self._n_failed += 1
            return
        self._n_prompt += len(visit.prompt)
        self._n_cached += flight.n_cached
        self._local += not flight.decisions[-1].prefill
        first_ns, last_ns = flight.token_ns[0], flight.token_ns[-1]
        self._ttft_ms.append((first_ns - began_ns) / 1e6)
        if len(flight.token_ns) > 1:
            self._tpot_ms.append((last_ns - first_ns) / 1e6 / (len(flight.token_ns) - 1))

    def _figures(self, span_s: float) -> Figures:
        workers = [*self._cluster.prefill, *self._cluster.decode]
        return Figures(
            n_requests=len(self._visits),
            n_failed=self._n_failed,
            n_prompt=self._n_prompt,
            hit_rate=self._n_cached / max(1, self._n_prompt),
            ttft_ms=distribution(self._ttft_ms),
            tpot_ms=distribution(self._tpot_ms),
            span_s=span_s,
            computed={worker.name: worker.compute.n_prompt_tokens for worker in workers},
            busy={worker.name: worker.compute.busy_s / span_s for worker in workers},
            local=self._local,
            n_preempted=sum(worker.compute.n_preempted for worker in workers),
        )


def play(setup: Setup, visits: Sequence[Visit], seed: int = 0) -> Figures:
    """The same for the same arguments, in any process."""
    return scheduler.run(_Play(setup, visits).run, seed)
