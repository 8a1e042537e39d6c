"""What one seed plays: which workers with what memory, what clients ask, how slow and how small everything is.

Everything is drawn once per seed and from few values far apart, since extremes find what averages hide.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from relay.config import Role, RouterConfig, RuntimeConfig
from relay.engine import modelled_runner
from relay.kv.layout import KVLayout
from relay.messages import Limits, Sampling, Stopping
from relay.simulation.network import Delay
from relay.simulation.oracle import Answer, answer

BLOCK_TOKENS, N_LAYERS, VOCAB_SIZE = 4, 2, 1000


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """One worker in all its lives. actors: name to whether it takes that role in reserve only. n_blocks: 0 for one without an engine."""

    name: str
    actors: dict[str, bool]
    n_blocks: int = 0
    starts_s: float = 0.0
    drain_rank: int = 2

    def roles(self, *, reserve: bool = False) -> tuple[str, ...]:
        """All that it can do, or what it does in reserve only."""
        return tuple(name.partition("/")[0] for name, in_reserve in self.actors.items() if in_reserve or not reserve)


@dataclass(frozen=True, slots=True)
class Wish:
    """One choice of one client's request. stop_at: its client wants no more after so many tokens, as with a stop string; 0 for never."""

    prompt: tuple[int, ...]
    sampling: Sampling
    stopping: Stopping
    right: Answer
    stop_at: int = 0
    prompt_logprobs: int = -1


@dataclass(frozen=True, slots=True)
class Visit:
    """One client.

    patience_s: it leaves then; reads_s: how long it takes to take what there is; deadline_s: 0 for none. resumes: its stream can be
    resumed, and it comes back within returns_s after a break; doubles: once before the first connection has ended. poison: with how many
    tokens it begins to kill whoever computes it. key: whose it is; empty for nobody's.
    """

    arrives_s: float
    gateway: int
    wishes: tuple[Wish, ...]
    salt: str
    priority: int
    patience_s: float
    reads_s: float
    deadline_s: float
    poison: int | None
    resumes: bool
    returns_s: float
    doubles: bool
    key: str = ""


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast the world is.

    detect_s: from a kill to the death, and from there to its reaping. told_s: from there to each worker. take_s: an actor's time for a
    message. yields: how often the loop runs for a while as the compute thread looks for jobs.
    """

    delay: Delay
    detect_s: float
    told_s: float
    load_s: float
    take_s: float
    report_s: float
    tile_ms: float
    silent_s: float
    link_deadline_s: float
    grace_s: float
    drain_s: float
    yields: float


@dataclass(frozen=True, slots=True)
class Scenario:
    """`spread_s`: requests come, and faults strike, within it. beside: steps are computed beside the compute thread.

    stops_s: the server is told to drain then; 0 for never. limits: of each key; empty where there are no keys.
    """

    workers: tuple[WorkerPlan, ...]
    visits: tuple[Visit, ...]
    pace: Pace
    router: RouterConfig
    runtime: RuntimeConfig
    window: int
    max_attempts: int
    max_running: int
    max_chunk_tokens: int
    tile_rows: int
    caching: bool
    spread_s: float
    draft_rows: int
    beside: bool
    verify_bytes_per_ms: int
    stops_s: float
    limits: dict[str, Limits] = field(default_factory=dict)

    @property
    def begins_s(self) -> float:
        """When clients and faults may come: if there are spares, once they are there."""
        return 2.5 if self.runtime.spares else 0.0

    @property
    def needs_patience(self) -> bool:
        """Whether a healthy server may refuse for want of room."""
        return self.router.max_queue < 100 or self.window < 100 or self.router.queue_timeout_s < 100

    def room(self) -> dict[Role, int]:
        """Tokens that the largest pool of those holds whose role it is, not only in reserve."""
        found: dict[Role, int] = {}
        for worker in self.workers:
            for role in ("prefill", "decode"):
                if role in worker.roles() and role not in worker.roles(reserve=True):
                    found[role] = max(found.get(role, 0), worker.n_blocks * BLOCK_TOKENS)
        return found

    def has_room_for(self, wish: Wish) -> bool:
        """Whether this server, when it is whole, can answer it, also if it must begin again with all tokens but the last."""
        return len(wish.prompt) + wish.stopping.max_tokens <= min(self.room().values())


def layout(n_blocks: int) -> KVLayout:
    """Of every pool: two layers, so that a push can stop between them."""
    return modelled_runner.layout(n_blocks, block_tokens=BLOCK_TOKENS, n_layers=N_LAYERS)


def draw_scenario(draw: random.Random) -> Scenario:
    max_context = draw.choice((16, 40, 40, 72))
    workers = _workers(draw, max_context)
    spread_s = draw.choice((0.01, 0.05, 0.2, 0.6))
    visits = _visits(draw, max_context, spread_s, sum(worker.name.startswith("gateway") for worker in workers))
    limits = {name: _limits(draw) for name in ("one", "two")} if draw.random() < 0.15 else {}
    if limits:
        workers = tuple(_with_counting(worker) for worker in workers)
        visits = tuple(replace(visit, key=draw.choice(list(limits))) for visit in visits)
    pace = _pace(draw)
    window = draw.choice((1, 2, 4, 8, 4096, 4096, 4096))
    return Scenario(
        workers=workers,
        visits=visits,
        pace=pace,
        router=RouterConfig(
            placement=draw.choice(("kv_aware", "kv_aware", "least_loaded", "round_robin")),
            local_prefill_tokens=draw.choice((0, 0, 4, 16, 1000)),
            max_queue=draw.choice((1024, 1024, 1024, 1024, 1024, 2)),
            queue_timeout_s=draw.choice((300.0, 300.0, 300.0, 0.3)),
            expected_tokens=draw.choice((1, 8, 256)),
            kv_overcommit=draw.choice((0.0, 0.5, 1.0)),
        ),
        runtime=_runtime(draw, pace, window),
        window=window,
        max_attempts=draw.choice((3, 5, 5, 8)),
        max_running=draw.choice((1, 2, 4, 64)),
        max_chunk_tokens=draw.choice((1, 5, 16, 512)),
        tile_rows=draw.choice((4, 16)),
        caching=draw.random() < 0.8,
        spread_s=spread_s,
        draft_rows=draw.choice((0, 0, 4, 8)),
        beside=draw.random() < 0.7,
        verify_bytes_per_ms=draw.choice((1, 1 << 20)),
        stops_s=spread_s * draw.random() if draw.random() < 0.06 else 0.0,
        limits=limits,
    )


def _limits(draw: random.Random) -> Limits:
    return Limits(requests=draw.choice((0, 0, 3)), tokens=draw.choice((0, 0, 150)), concurrency=draw.choice((0, 1, 2)))


def _with_counting(worker: WorkerPlan) -> WorkerPlan:
    """With the actors that it has where there are keys."""
    more = {name.replace("gateway", "quota").replace("router", "limiter"): False for name in worker.actors}
    return replace(worker, actors={**worker.actors, **more})


def _workers(draw: random.Random, max_context: int) -> tuple[WorkerPlan, ...]:
    least = -(-max_context // BLOCK_TOKENS)
    starts: Callable[[], float] = lambda: draw.choice((0.0, 0.0, 0.0, 0.05)) * draw.random()  # noqa: E731
    workers = [WorkerPlan(f"gateway-{i}", {f"gateway/{i}": False}, starts_s=starts(), drain_rank=0) for i in range(draw.choice((1, 1, 2)))]
    workers.append(WorkerPlan("router-0", {"router/0": False}, starts_s=starts(), drain_rank=1))
    shape = draw.choice(("disaggregated", "disaggregated", "aggregated", "mixed", "reserve"))
    n_prefill, n_decode, n_both = {
        "disaggregated": (draw.choice((1, 1, 2, 3)), draw.choice((1, 1, 2, 3)), 0),
        "aggregated": (0, 0, draw.choice((1, 2))),
        "mixed": (draw.choice((0, 1, 2)), draw.choice((0, 1, 2)), 1),
        "reserve": (draw.choice((1, 2)), draw.choice((1, 2)), 0),
    }[shape]
    sizes = draw.choice(((0,), (0, 3), (0, 3, 40), (60,), (-least // 2, 0, 40), (-least // 2, -least // 3)))
    numbers = {"prefill": 0, "decode": 0}

    def name(role: str) -> str:
        numbers[role] += 1
        return f"{role}/{numbers[role] - 1}"

    kinds = [("prefill", n_prefill), ("decode", n_decode), ("both", n_both)]
    for kind, n in kinds:
        for i in range(n):
            actors = {name(role): False for role in (("prefill", "decode") if kind == "both" else (kind,))}
            if shape == "reserve":
                actors[name("decode" if kind == "prefill" else "prefill")] = True
            workers.append(WorkerPlan(f"{kind}-{i}", actors, max(2, least + draw.choice(sizes)), starts()))
    return tuple(workers)


def _pace(draw: random.Random) -> Pace:
    delay: Delay = draw.choice((_none, _even, _wild, _wild))
    return Pace(
        delay=delay,
        detect_s=draw.choice((0.0, 0.005, 0.01)),
        told_s=draw.choice((0.0, 0.003, 0.1)),
        load_s=draw.choice((0.0, 0.02)),
        take_s=draw.choice((0.0, 0.0, 0.0003, 0.002)),
        report_s=draw.choice((0.0, 0.0, 0.001, 0.004)),
        tile_ms=draw.choice((0.3, 1.0, 4.0)),
        silent_s=draw.choice((0.15, 0.4)),
        link_deadline_s=draw.choice((0.06, 10.0)),
        grace_s=draw.choice((0.05, 0.5)),
        drain_s=draw.choice((0.02, 0.3)),
        yields=draw.choice((0.0, 0.2, 0.2, 0.5)),
    )


def _runtime(draw: random.Random, pace: Pace, window: int) -> RuntimeConfig:
    """No step lasts as long as `hang_s`."""
    backoff_s = draw.choice((0.005, 0.02, 0.3))  # without any, a start that fails is tried again before time passes
    return RuntimeConfig(
        heartbeat_s=pace.silent_s / 2.5,
        silent_s=pace.silent_s,
        hang_s=1.0,
        ready_within_s=5.0,
        link_deadline_s=pace.link_deadline_s,
        max_restarts=draw.choice((1000,) * 6 + (0, 1)),
        within_s=draw.choice((60.0, 0.5)),
        first_backoff_s=backoff_s,
        most_backoff_s=draw.choice((1, 4)) * backoff_s,
        spares=draw.choice((0, 0, 0, 1)),
        window=window,
    )


def _none(draw: random.Random) -> float:
    return 0.0


def _even(draw: random.Random) -> float:
    return 0.0002 + 0.0001 * draw.random()


def _wild(draw: random.Random) -> float:
    return draw.choice((0.0, 0.0001, 0.0005, 0.002, 0.01)) * draw.random()


def _visits(draw: random.Random, max_context: int, spread_s: float, n_gateways: int) -> tuple[Visit, ...]:
    prefixes = [tuple(draw.randrange(VOCAB_SIZE) for _ in range(draw.randint(1, max_context // 2))) for _ in range(draw.choice((1, 3)))]
    passages = [tuple(draw.randrange(VOCAB_SIZE) for _ in range(BLOCK_TOKENS * draw.choice((1, 1, 2)))) for _ in range(3)]
    reordering = draw.choice((0.0, 0.0, 0.4))
    n = draw.choice((3, 6, 10, 14))
    poisonous = draw.randrange(n) if draw.random() < 0.08 else -1
    harmless = draw.choice((0, 0, 1, 2, 5))
    leaving = draw.choice((0.0, 0.2, 0.6))
    resuming = draw.choice((0.0, 0.0, 0.3, 1.0))
    visits = []
    for i in range(n):
        head = draw.choice(prefixes) if draw.random() < 0.7 else ()
        if draw.random() < reordering:  # the same blocks behind different ones
            head = tuple(token for _ in range(draw.choice((2, 3))) for token in draw.choice(passages))
        tail = tuple(draw.randrange(VOCAB_SIZE) for _ in range(draw.choice((0, 1, 3, 9))))
        prompt = (head + tail)[: max_context - 1] or (7,)
        leaves, resumes = draw.random() < leaving, draw.random() < resuming
        visits.append(
            Visit(
                arrives_s=spread_s * draw.random(),
                gateway=draw.randrange(n_gateways),
                wishes=_wishes(draw, prompt, max_context - len(prompt)),
                salt=draw.choice(("", "", "a")),
                priority=draw.choice((0, 0, 0, -1, 5)),
                patience_s=draw.choice((0.0, 0.005, 0.05, 0.2)) * draw.random() if leaves else float("inf"),
                reads_s=draw.choice((0.0, 0.0, 0.003, 0.05)),
                deadline_s=draw.choice((0.0,) * 9 + (0.05,)),
                poison=harmless if i == poisonous else None,
                resumes=resumes,
                returns_s=draw.choice((0.0, 0.02, 0.3)),
                doubles=resumes and draw.random() < 0.4,
            )
        )
    return tuple(visits)


def _wishes(draw: random.Random, prompt: tuple[int, ...], room: int) -> tuple[Wish, ...]:
    n_choices = draw.choice((1, 1, 1, 1, 2, 3))
    max_tokens = max(1, min(room, draw.choice((1, 2, 6, 14, 30))))
    warm, seed = draw.random() < 0.5, draw.randrange(1 << 30)
    prompt_logprobs = 0 if draw.random() < 0.05 else -1
    wishes = []
    for choice in range(n_choices):
        sampling = Sampling(temperature=1.0 if warm else 0.0, seed=seed, choice=choice, logprobs=draw.choice((-1, 0)))
        free = answer(prompt, sampling, Stopping(max_tokens=max_tokens), VOCAB_SIZE, N_LAYERS)
        stop_ids = (draw.choice(free.ids),) if draw.random() < 0.2 else ()
        stopping = Stopping(max_tokens=max_tokens, stop_ids=stop_ids)
        right = answer(prompt, sampling, stopping, VOCAB_SIZE, N_LAYERS) if stop_ids else free
        stop_at = draw.randint(1, max_tokens) if draw.random() < 0.15 else 0
        wishes.append(Wish(prompt, sampling, stopping, right, stop_at, prompt_logprobs))
    return tuple(wishes)
