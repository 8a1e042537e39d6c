"""One gateway, the router, prefill and decode workers, each on a node of its own, all up and none ever down. Nothing fails."""

from collections.abc import Callable
from itertools import permutations

import msgspec
import trio

from relay.actors.decode import DecodeActor
from relay.actors.gateway import GatewayActor
from relay.actors.prefill import PrefillActor
from relay.actors.router import RouterActor
from relay.config import EngineConfig, RouterConfig
from relay.engine.engine import Engine
from relay.engine.host import EngineHost
from relay.kv.book import BlockBook
from relay.kv.pools import Pools
from relay.messages import Address, Message
from relay.policy.batching import StepClock
from relay.replay.compute import TimedCompute
from relay.replay.machine import NoBytes, StepCost, TimedRunner
from relay.runtime.node import Node

MODEL = "replayed"
Actor = GatewayActor | RouterActor | PrefillActor | DecodeActor


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What is served with. n_blocks: of each pool, 16 tokens each; the default is what 1 GiB holds of SmolLM2-135M in bfloat16."""

    n_prefill: int = 2
    n_decode: int = 2
    n_blocks: int = 2912
    router: RouterConfig = RouterConfig()
    engine: EngineConfig = EngineConfig()
    cost: StepCost = StepCost()


class Worker:
    """A node with one actor, and with an engine and a pool if it computes."""

    def __init__(self, cluster: "Cluster", name: str, make: Callable[["Worker"], Actor]) -> None:
        self.name, self.cluster = name, cluster
        self.address = Address(name.replace("-", "/"), 1)
        self.node = Node(name, 1)
        self.actor = make(self)

    def engine(self, setup: Setup) -> EngineHost:
        """Made once, for its actor."""
        cost, config = setup.cost, setup.engine
        self.memory, self.book = NoBytes(setup.n_blocks), BlockBook(setup.n_blocks)
        runner = TimedRunner(self.memory, cost)
        engine = Engine(
            runner,
            self.book,
            # as its figures were taken: no longer steps for prompts alone, since no step is abandoned here
            StepClock(1, config.max_step_ms, cost.row_ms, cost.fixed_ms, cost.pair_ms),
            max_running=config.max_running,
            max_chunk_tokens=config.max_chunk_tokens,
            floor_ns=lambda n_rows, n_kv_tokens: 0,
            first=config.first,
        )
        self.compute = TimedCompute(engine, runner)
        self.host = EngineHost(engine, max_running=config.max_running, compute=self.compute)
        return self.host


class Road:
    """One direction between two nodes: in order, and at once, since a hop is next to nothing beside a step."""

    def __init__(self, source: Node, target: Node) -> None:
        self._target, self._origin = target, (source.worker, source.epoch)

    def deliver(self, to: Address, body: Message) -> None:
        self._target.delivered(self._origin, to, body)

    def credit(self, to: Address, n: int) -> None:
        self._target.credited(to, n)


class Cluster:
    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.n_violations = 0
        self.gateway = GatewayActor(max_attempts=3, on_event=self._on_event)
        self.router = RouterActor(setup.router, MODEL)
        self.prefill = [Worker(self, f"prefill-{i}", self._prefill) for i in range(setup.n_prefill)]
        self.decode = [Worker(self, f"decode-{i}", self._decode) for i in range(setup.n_decode)]
        edges = Worker(self, "gateway-0", lambda worker: self.gateway), Worker(self, "router-0", lambda worker: self.router)
        self._workers = [*edges, *self.prefill, *self.decode]

    def _on_event(self, what: str) -> None:
        self.n_violations += what == "violation"

    def _prefill(self, worker: Worker) -> Actor:
        host = worker.engine(self.setup)
        return PrefillActor(host, worker.book, worker.memory, Pools(worker.memory, (worker.address,), self._map_pool), worker.name, MODEL)

    def _decode(self, worker: Worker) -> Actor:
        return DecodeActor(worker.engine(self.setup), worker.book, worker.memory, worker.name, MODEL)

    def _map_pool(self, address: Address, handle: object) -> NoBytes | None:
        return next((worker.memory for worker in self.decode if worker.address == address), None)

    async def run(self) -> None:
        """Until cancelled."""
        async with trio.open_nursery() as nursery:
            for worker in self._workers:
                nursery.start_soon(worker.actor.run, worker.node.open(worker.address.actor))
            for worker in (*self.prefill, *self.decode):
                nursery.start_soon(worker.host.run)
            for worker in self._workers:
                worker.node.up(worker.name, 1, (worker.address.actor,))
            for one, other in permutations(self._workers, 2):
                one.node.up(other.name, 1, (other.address.actor,), Road(one.node, other.node))
