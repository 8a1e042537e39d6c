"""One incarnation of one worker: its node, its actors, its engine and pool. It can stand still, and it can die; it never comes back."""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import trio
from prometheus_client import CollectorRegistry

from relay.actors.decode import DecodeActor
from relay.actors.gateway import GatewayActor
from relay.actors.limiter import LimiterActor
from relay.actors.prefill import PrefillActor
from relay.actors.quota import QuotaActor
from relay.actors.router import RouterActor
from relay.auth.metrics import KeyMetrics
from relay.engine.host import EngineHost
from relay.errors import Draining
from relay.http.limits import Meter
from relay.kv.book import BlockBook
from relay.kv.pools import Pools
from relay.messages import Address, Admit, Expect, Message, Prefill
from relay.policy.batching import StepClock
from relay.runtime.frames import Ready, WorkerDown
from relay.runtime.mailbox import AtOnce, Mailbox
from relay.runtime.node import Context, Node
from relay.simulation.compute import SimulatedCompute
from relay.simulation.guesses import OracleDrafter
from relay.simulation.machine import Machine
from relay.simulation.memory import GuardedMemory, MemoryBoard, simulated_pools
from relay.simulation.network import Link
from relay.simulation.scenario import N_LAYERS, VOCAB_SIZE, WorkerPlan, layout
from relay.simulation.watched_engine import WatchedEngine

if TYPE_CHECKING:
    from relay.simulation.child import SimulatedChild
    from relay.simulation.world import World

MODEL = "modelled"
Actor = GatewayActor | RouterActor | PrefillActor | DecodeActor | QuotaActor | LimiterActor


class Life:
    """`known`: the lives that this one has been told are up. `links`: its own to them, one direction each."""

    def __init__(self, world: "World", plan: WorkerPlan, epoch: int, child: "SimulatedChild") -> None:
        self.world, self.plan, self.name, self.epoch, self.child = world, plan, plan.name, epoch, child
        self.key = plan.name, epoch
        self.addresses = tuple(Address(actor, epoch) for actor in plan.actors)
        self.node = Node(plan.name, epoch, window=world.scenario.window, hold_early=True)
        self.dead = self.up = self.draining = False
        self.n_too_large = 0  # so many of the next attempts that it passes on fit in no frame
        self.sending: Message | None = None
        self.scope = trio.CancelScope()
        self.known: dict[Life, None] = {}
        self.links: dict[Life, Link] = {}
        self._unopened: dict[Life, list[Callable[[], None]]] = {}
        self._held: list[Callable[[], None]] = []
        self._stops = self._jams = 0
        self._go, self._unjammed, self._hurry = trio.Event(), trio.Event(), trio.Event()
        self._go.set()
        self._unjammed.set()
        self.board = MemoryBoard()
        self.actors: dict[str, Actor] = {}
        self.pools: Pools | None = None
        self.compute: SimulatedCompute | None = None
        self.meter: Meter | None = None
        if plan.n_blocks:
            self._load_engine()
        else:
            self._load()

    def __str__(self) -> str:
        return f"{self.name}@{self.epoch}"

    def is_too_large(self, message: Message) -> bool:
        """Whether this one fits in no frame: what carries a whole attempt, as it is sent, and no later."""
        if self.n_too_large == 0 or message is not self.sending or not isinstance(message, Admit | Expect | Prefill):
            return False
        self.n_too_large -= 1
        self.sending = None
        admit = message.admit if isinstance(message, Expect) else message
        self.world.faults.too_large[admit.request_id] = None
        return True

    # --- what lives here; as in relay.worker

    def _load(self) -> None:
        scenario, watch = self.world.scenario, self.world.watch
        for name in self.plan.actors:
            if name.startswith("gateway/"):
                self.actors[name] = GatewayActor(max_attempts=scenario.max_attempts, on_event=watch.gateway_says)
            elif name.startswith("quota/"):
                self.actors[name] = quota = QuotaActor()
                self.meter = Meter(quota, KeyMetrics(CollectorRegistry()))
            elif name.startswith("limiter/"):
                self.actors[name] = LimiterActor(tuple(name for worker in scenario.workers for name in worker.actors if "quota/" in name))
            else:
                self.actors[name] = RouterActor(scenario.router, MODEL, caching=scenario.caching, room=scenario.room())

    def _load_engine(self) -> None:
        scenario = self.world.scenario
        self.memory = GuardedMemory(layout(self.plan.n_blocks), self)
        self.book = BlockBook(self.plan.n_blocks, caching=scenario.caching)
        guesses = self.world.draw_of(f"guesses of {self}")
        machine = Machine(self, self.memory, VOCAB_SIZE, scenario.tile_rows, beside=scenario.beside)
        self.engine = WatchedEngine(
            machine,
            self.book,
            StepClock(scenario.tile_rows, 4 * scenario.pace.tile_ms, scenario.pace.tile_ms),
            max_running=scenario.max_running,
            max_chunk_tokens=scenario.max_chunk_tokens,
            floor_ns=lambda n_rows, n_kv_tokens: 0,
            board=self.board,
            drafter=lambda sequence: OracleDrafter(sequence, guesses, VOCAB_SIZE, N_LAYERS),
            draft_rows=scenario.draft_rows,
            verify_bytes_per_ms=scenario.verify_bytes_per_ms,
        )
        self.compute = SimulatedCompute(self, self.engine, machine)
        self.host = EngineHost(self.engine, max_running=scenario.max_running, compute=self.compute)
        self.pools = simulated_pools(self.memory, self.addresses)
        prefills = any(name.startswith("prefill/") and not reserve for name, reserve in self.plan.actors.items())
        for name, reserve in self.plan.actors.items():
            if name.startswith("prefill/"):
                self.actors[name] = PrefillActor(self.host, self.book, self.memory, self.pools, self.name, MODEL, reserve=reserve)
            else:
                self.actors[name] = DecodeActor(
                    self.host,
                    self.book,
                    self.memory,
                    self.name,
                    MODEL,
                    reserve=reserve,
                    prefills=prefills,
                    grace_s=scenario.pace.grace_s,
                )

    async def live(self) -> None:
        """Until it dies. What an actor raises is the world's to judge."""
        contexts = {name: SimulatedContext(self, self.node.open(name)) for name in self.actors}
        try:
            with self.scope:
                async with trio.open_nursery() as self.nursery:
                    for name, actor in self.actors.items():
                        self.nursery.start_soon(actor.run, contexts[name])
                    if self.compute is not None:
                        self.nursery.start_soon(self.host.run)
                    await trio.lowlevel.checkpoint()
                    self.child.say(Ready(actors=tuple(self.actors)))
                    await self.child.beat()
        except Exception:
            if not self.dead:
                raise

    def spawn(self, task: Callable[[], Awaitable[None]]) -> None:
        """Beside the actors, in this process: it dies with it."""
        self.nursery.start_soon(task)

    # --- standing still, dying

    async def runs(self) -> None:
        await self._go.wait()

    async def computes(self) -> None:
        """As `runs`, for the compute thread, which can hang while the loop turns."""
        await self._go.wait()
        await self._unjammed.wait()

    def pause(self) -> None:
        """The whole process. Faults may overlap, so it is counted."""
        if self._stops == 0 and not self.dead:  # nobody waits for the dead
            self._go = trio.Event()
        self._stops += 1

    def go_on(self) -> None:
        self._stops -= 1
        if self._stops == 0 and not self.dead:
            self._go.set()
            held, self._held = self._held, []
            for arrive in held:
                arrive()

    @property
    def is_jammed(self) -> bool:
        return not self._unjammed.is_set()

    def jam(self) -> None:
        """A step that never ends."""
        self._unjammed = trio.Event()

    def die(self, how: str) -> None:
        """From this instant on nothing leaves it. `how`: as `Child.fence` says it."""
        if self.dead:
            return
        self.dead = True
        self.world.trace.note(f"{self} dies: {how}")
        self.scope.cancel()
        self._go.set()  # for who waits outside; what is inside is cancelled already
        self._held.clear()
        if how != "exit 0":
            for link in self.links.values():
                link.sender_died()
        self.world.supervisor.died(self, how)
        self.child.ends(how)

    async def drain(self, *, at_once: bool = False) -> None:
        """What `relay.worker` does when it is told to drain; then the process ends by itself, and everything it said arrives."""
        if at_once:
            self._hurry.set()
        if self.draining:
            return
        self.draining = True
        async with trio.open_nursery() as nursery:
            for actor in self.actors.values():
                if isinstance(actor, DecodeActor):
                    nursery.start_soon(self._drain_decode, actor)
                elif isinstance(actor, PrefillActor):
                    nursery.start_soon(actor.drain)
        for actor in self.actors.values():
            if isinstance(actor, GatewayActor):
                with trio.move_on_after(self.world.scenario.pace.drain_s):
                    while actor.n_flights and not self._hurry.is_set():
                        await trio.sleep(0.01)
                await self.runs()
                actor.end_all(Draining("the server went down before this was finished"))
                while any(connection.life is self and not connection.outcome for connection in self.world.connections()):
                    await trio.sleep(0.01)
        await self.runs()
        self.die("exit 0")

    async def _drain_decode(self, actor: DecodeActor) -> None:
        began_s, within_s = trio.current_time(), self.world.scenario.pace.drain_s
        await actor.drain(within_s)
        if trio.current_time() < began_s + within_s:
            self.world.watch.readers.drained(self, actor._context.address)

    def reached(self, point: str) -> None:
        """A place where the plan may want something to happen."""
        self.world.faults.reached(point, self)

    # --- from outside

    def receive(self, source: "Life", arrive: Callable[[], None]) -> None:
        """From a link. What comes from a life that we have not been told of waits until we are."""

        def open_it() -> None:
            if source in self.known:
                arrive()
            else:
                self._unopened.setdefault(source, []).append(arrive)

        self.when_running(open_it)

    def when_running(self, call: Callable[[], None]) -> None:
        """Now, or with what else waits for it once it goes on, in order; never if it is dead."""
        if self.dead:
            return
        if self._stops:
            self._held.append(call)
        else:
            call()

    def hear_up(self, other: "Life") -> None:
        """The supervisor's word."""
        self.known[other] = None
        if other is self:
            self.node.up(*self.key, tuple(self.plan.actors))
            return
        link = self.links[other] = self.world.link(self, other)
        self.node.up(*other.key, tuple(other.plan.actors), link)
        for arrive in self._unopened.pop(other, ()):
            arrive()

    def hear_down(self, frame: WorkerDown, other: "Life") -> None:
        """The supervisor's word: what the dead one wrote is read first."""
        link = other.links.get(self)
        if link is not None and not link.is_empty() and other in self.known:
            self.world.agenda.at(max(link.last, trio.current_time()), lambda: self.when_running(lambda: self.hear_down(frame, other)))
            return
        self.known.pop(other, None)
        self._unopened.pop(other, None)
        self.links.pop(other, None)
        self.node.down(frame.worker, frame.epoch, frame.reason, frame.actors, suspects=frame.suspects, lone=frame.lone)


class SimulatedContext(Context):
    """An actor's world: time stands still with its worker, nothing leaves a dead one, and what is sent and taken is watched."""

    def __init__(self, life: Life, real: Context) -> None:
        super().__init__(life.node, real.address, SimulatedInbox(life, real.address, real.inbox))
        self._life, self._real = life, real
        self.post, self.offer, self.send = self._post, self._offer, self._send

    async def sleep(self, seconds: float) -> None:
        await trio.sleep(seconds)
        await self._life.runs()

    def _post(self, to: Address, message: Message) -> None:
        if not self._life.dead:
            self._life.sending = message
            self._real.post(to, message)
            self._sent(to, message)

    def _offer(self, to: Address, message: Message) -> None:
        if not self._life.dead:
            self._life.sending = message
            self._real.offer(to, message)
            self._sent(to, message)

    async def _send(self, to: Address, message: Message) -> None:
        await self._real.send(to, message)
        if not self._life.dead:
            self._sent(to, message)
        await self._life.runs()

    def _sent(self, to: Address, message: Message) -> None:
        life = self._life
        if life.sending is None and isinstance(message, Admit | Expect | Prefill):
            life.world.trace.note(f"too large: {message}")
            return
        life.sending = None
        life.world.trace.mail("sent", str(self.address), to, message)
        life.world.watch.sent(life, self.address, to, message)
        life.reached(f"sent {type(message).__name__}")


class SimulatedInbox(Mailbox):
    """A mailbox whose reader takes his time, and may die before or after each message."""

    def __init__(self, life: Life, address: Address, real: Mailbox) -> None:
        self._life, self._address, self._real = life, address, real
        self._draw = life.world.draw_of("inbox")
        self._last: Message | None = None
        self._in_hand = False

    def take_at_once(self, how: AtOnce | None) -> None:
        """See `Mailbox.take_at_once`: half of them are."""
        life, draw = self._life, self._life.world.draw_of("at once")

        def take(message: Message) -> None:
            assert how is not None
            life.world.trace.mail("took", str(self._address), self._address, message)
            life.reached(f"took {type(message).__name__}")
            if life.dead:
                return
            life.world.watch.taken(life, self._address, message)
            how.take(message)
            life.world.watch.handled(life, self._address, message)
            life.reached(f"handled {type(message).__name__}")

        is_free: Callable[[], bool] = lambda: not self._in_hand and not life.dead and draw.random() < 0.5  # noqa: E731
        self._real.take_at_once(None if how is None else AtOnce(how.kind, take, is_free))

    async def __anext__(self) -> Message:
        life, pace = self._life, self._life.world.scenario.pace
        if self._last is not None:
            life.world.watch.handled(life, self._address, self._last)
            life.reached(f"handled {type(self._last).__name__}")
            self._last = None
        self._in_hand = False
        if pace.take_s:
            await trio.sleep(pace.take_s * self._draw.random())
        await life.runs()
        message = await anext(self._real)
        self._in_hand = True
        await life.runs()
        life.world.trace.mail("took", str(self._address), self._address, message)
        life.reached(f"took {type(message).__name__}")
        await trio.lowlevel.checkpoint()
        life.world.watch.taken(life, self._address, message)
        self._last = message
        return message
