"""Laws on the trace: what no end state shows, because something later heals it or writes over it.

Told of every message sent, taken and handled, of every step begun and every write into a pool. Raises Violation on the spot.
"""

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import trio

from relay.actors.decode import DecodeActor
from relay.actors.gateway import Flight, GatewayActor
from relay.actors.prefill import PrefillActor
from relay.actors.router import RouterActor
from relay.clock import now_ns
from relay.engine.step import Step
from relay.ledger.ledger import Ledger
from relay.ledger.spans import Span
from relay.messages import (
    Address,
    Admit,
    Announced,
    Cancel,
    Declined,
    Detach,
    Displaced,
    Down,
    Expect,
    Key,
    Left,
    Message,
    Placed,
    Prefill,
    Prefilled,
    Resume,
    Returned,
    Revoke,
    Row,
    Tokens,
)
from relay.simulation.keys import Keys
from relay.simulation.memory import GuardedMemory
from relay.simulation.readers import Readers
from relay.simulation.violation import Violation

if TYPE_CHECKING:
    from relay.simulation.life import Life
    from relay.simulation.world import World


_STEPS = tuple(span for span in Span if span.name.startswith(("PREFILL_", "DECODE_")) and "QUEUE" not in span.name)


@dataclass(slots=True)
class Lease:
    """As both sides' messages tell it: from Prefill to Prefilled or Returned."""

    holder: Address
    blocks: dict[int, None]
    revoked: bool = False
    over: bool = False


class Watch:
    def __init__(self, world: "World") -> None:
        self._world = world
        self._leases: dict[tuple[Address, Key], Lease] = {}
        self._cancelled: dict[tuple[Address, Key], None] = {}  # at this decode actor, handled
        self._revoked: dict[tuple[Address, Address, Key], None] = {}  # at this prefill actor, for this decode actor, handled
        self._mourned: dict[tuple[Address, Address], None] = {}  # this prefill actor knows that decode actor to be dead
        self._placed: dict[tuple[Address, Key], Address] = {}  # by this router, with this decode actor
        self._routed_cancels: dict[tuple[Address, Key], None] = {}
        self._forwarded: dict[tuple[Address, Key], None] = {}
        self._finished: dict[tuple[Address, str], None] = {}  # as this gateway was told
        self._next: dict[tuple[Address, Address, Key], int] = {}  # index of the next token that this decode actor sends to this gateway
        self._resuming: dict[tuple[Address, str], None] = {}  # this decode actor is answering a Resume
        self._replays: Counter[tuple[Address, Address, Key]] = Counter()  # how often a row from the first token on is to come again
        self._first: dict[tuple[Address, Key], None] = {}  # first tokens that this prefill actor has sent to a gateway
        self._homes: dict[tuple[Flight, int], Address] = {}  # where this attempt of it was placed first
        self._left: dict[tuple[Address, Key], None] = {}  # what this prefill actor has told the router that it is done with
        self._prefills: dict[tuple[Address, Key], None] = {}  # which prompts this prefill actor has taken
        self._owes_left: dict[tuple[Address, Key], None] = {}  # what it has told others so
        self._admitted: dict[tuple[Address, str], int] = {}  # the newest attempt that this gateway has sent
        self._drains: dict[tuple[Address, Key], Address] = {}  # who tells this gateway that it has displaced that attempt as it drained
        self._drained: dict[tuple[Address, Address, str], int] = {}  # the newest attempt when the gateway heard it of this decode actor
        self._n_failures = 0  # of the flight whose Displaced its gateway is about to handle
        self._held: dict[Key, None] = {}  # attempts at the decode actor that is about to handle an Expect
        self.spoke_s: dict[str, float] = {}  # since when a decode actor keeps the log of this request, if it has ended
        self.tried: dict[str, None] = {}  # requests in whose lone step a worker died by chance
        self._kills: Counter[str] = Counter()  # workers that this request has killed
        self._computed_ns: Counter[tuple[Address, str]] = Counter()  # of a request's steps at this decode actor
        self.n_endings_sent = 0
        self.readers = Readers(world.scenario.pace.grace_s)
        self.keys = Keys(world)

    # --- messages

    def sent(self, life: "Life", source: Address, to: Address, message: Message) -> None:
        self.readers.sent(source, to, message)
        match message:
            case Prefill():
                here = life.node.is_local(to)
                size = life.memory.layout.block_tokens
                blocks = message.blocks[message.n_present // size :] if here else message.blocks
                self._not_cancelled(source, (message.request_id, message.attempt), "leases blocks for it")
                self._leases[source, (message.request_id, message.attempt)] = Lease(to, dict.fromkeys(blocks))
            case Placed():
                self._not_cancelled(source, (message.request_id, message.attempt), "says that it is placed")
                self.spoke_s[message.request_id] = trio.current_time()
            case Displaced() if source.actor.startswith("decode/"):
                if message.drained:
                    self._drains[to, (message.request_id, message.attempt)] = source
                if (source, message.request_id) not in self._resuming:
                    self._not_cancelled(source, (message.request_id, message.attempt), "says that it is displaced")
            case Admit():
                self._admitted[source, message.request_id] = message.attempt
            case Revoke():
                lease = self._leases.get((source, (message.request_id, message.attempt)))
                if lease is not None:
                    lease.revoked = True
            case Prefilled():
                key = message.request_id, message.attempt
                if (source, key) not in self._first:
                    raise Violation("first token on two roads", f"{source} has not sent {key} to its gateway")
                self._end_lease(source, to, key)
                self._owes_left[source, key] = None
            case Returned():
                key = message.request_id, message.attempt
                self._end_lease(source, to, key)
                if (source, key) in self._prefills:  # else it has never heard of it, and its place is given up by decode's Left
                    self._owes_left[source, key] = None
            case Left():
                self._left[source, (message.request_id, message.attempt)] = None
                self._log_goes_on(life, source, (message.request_id, message.attempt))
            case Tokens():
                for row in message.rows:
                    self._row(source, to, row)
            case Expect():
                key = message.admit.request_id, message.admit.attempt
                if (source, key) in self._routed_cancels:
                    raise Violation("computed after its cancel", f"{source} places {key} after its Cancel")
                if self._drained.get((to, message.admit.gateway, key[0]), key[1]) < key[1]:
                    raise Violation("placed where it was drained", f"{source} places {key} at {to}, which has displaced it as it drained")
                self._placed[source, key] = to
            case Cancel():
                self.n_endings_sent += 1
                self._forwarded[source, (message.request_id, message.attempt)] = None
            case Detach():
                self.n_endings_sent += 1
                self._forwarded[source, (message.request_id, message.attempt)] = None

    def taken(self, life: "Life", address: Address, message: Message) -> None:
        if isinstance(message, Left | Declined):
            decode = message.address if isinstance(message, Left) else message.decode
            key = message.request_id, message.attempt
            if self._placed.get((address, key)) == decode:
                del self._placed[address, key]
        elif isinstance(message, Admit):
            key = message.request_id, message.attempt
            if self._placed.get((address, key)) in message.dead:  # so its gateway says, before the router hears of it
                del self._placed[address, key]
        elif isinstance(message, Resume):
            self._resuming[address, message.request_id] = None
            self._log_goes_on(life, address, (message.request_id, message.attempt))
            self._replays[address, message.gateway, (message.request_id, message.attempt)] += 1
        elif isinstance(message, Expect):
            decode_actor = life.actors[address.actor]
            assert isinstance(decode_actor, DecodeActor)
            self._held = dict.fromkeys(decode_actor._entries)
        elif isinstance(message, Displaced):
            self._n_failures = self._failures(life, address, message)
            if message.drained:
                source = self._drains[address, (message.request_id, message.attempt)]
                newest = self._admitted.get((address, message.request_id), message.attempt)
                self._drained[source, address, message.request_id] = newest

    def handled(self, life: "Life", address: Address, message: Message) -> None:
        """The actor has gone on to its next message."""
        if address.actor.startswith("decode/"):
            self.readers.handled(address, message)
        if isinstance(message, Cancel):
            key = message.request_id, message.attempt
            if address.actor.startswith("decode/"):
                decode = life.actors[address.actor]
                assert isinstance(decode, DecodeActor)
                entry = decode._entries.get(key)
                if entry is not None and entry.log is not None and entry.gateway != message.gateway:
                    return  # somebody else reads it now
                self._cancelled[address, key] = None
                self._is_revoked(life, address, key)
            elif address.actor.startswith("router/"):
                self._routed_cancels[address, key] = None
                place = self._placed.get((address, key))
                if place is not None and life.node.is_alive(place) and (address, key) not in self._forwarded:
                    raise Violation("cancel lost", f"{address} has not passed on the Cancel of {key} to {place}")
        elif isinstance(message, Revoke):
            self._revoked[address, message.decode, (message.request_id, message.attempt)] = None
        elif isinstance(message, Resume):
            self._resuming.pop((address, message.request_id))
        elif isinstance(message, Down):
            self._is_mourned(life, address, message.address)
        elif isinstance(message, Placed | Tokens):
            self._is_answered(life, address, message)
        elif isinstance(message, Prefill):
            self._prefills[address, (message.request_id, message.attempt)] = None
        elif isinstance(message, Expect):
            self._is_leased_rightly(life, address, message)
        elif isinstance(message, Displaced) and message.drained:
            if self._failures(life, address, message) > self._n_failures:
                raise Violation("a drain is no failure", f"{address} counts it as one of {message.request_id}")
        elif isinstance(message, Announced):
            self._is_known(life, address, message)
        self._has_left(life, address)
        if address.actor.startswith("router/"):
            router = life.actors[address.actor]
            assert isinstance(router, RouterActor)
            self._nobody_waits_for_nothing(router, address)

    def gateway_says(self, event: str) -> None:
        if event == "violation":
            raise Violation("index", "a gateway found tokens missing, or twice and different")

    # --- steps and writes

    def began(self, life: "Life", step: Step) -> None:
        for part in step.parts:
            sequence = part.sequence
            for address in life.addresses:
                if sequence.side == "decode" and (address, sequence.key) in self._cancelled:
                    raise Violation("computed after its cancel", f"{address} computes {sequence.key} after its Cancel")
                target = sequence.target.memory if sequence.target is not None else life.memory
                assert isinstance(target, GuardedMemory)
                for decode in target.owner.addresses:
                    if sequence.side == "prefill" and (address, decode, sequence.key) in self._revoked:
                        raise Violation("computed after its cancel", f"{address} computes {sequence.key} of {decode} after its Revoke")
                    if (address, decode) in self._mourned:
                        raise Violation("computed after its cancel", f"{address} computes {sequence.key} for {decode}, which is dead")

    def reported(self, life: "Life") -> None:
        problem = life.book.counts().audit()
        if problem:
            raise Violation("blocks", f"{life}: {problem}")
        for address in life.addresses:
            self._has_left(life, address)

    def poisoned(self, request_ids: list[str]) -> None:
        """A worker is about to die of these. Each kills in company once, and once more alone; then its gateway knows, if it lives. What had
        been sent on behalf of it by then may kill once or twice more."""
        if self._world.supervisor.has_restarted("gateway"):
            return
        visits = {client.name: client.visit for client in self._world.clients}
        for request_id in request_ids:
            self._kills[request_id] += 1
            if self._kills[request_id] > 4 and not visits[request_id.split("/")[0]].resumes:
                raise Violation("poison goes on", f"{request_id} is about to kill its fifth worker")

    def writes(self, writer: "Life", owner: "Life", key: Key, blocks: list[int]) -> None:
        """Into leased blocks: who writes must hold that lease, and not have given it up."""
        for decode in owner.addresses:
            lease = self._leases.get((decode, key))
            if lease is None:
                continue
            if lease.holder not in writer.addresses:
                raise Violation("write without a lease", f"{writer} writes for {key} of {decode}; {lease.holder} holds the lease")
            if lease.over:
                raise Violation("write without a lease", f"{writer} writes for {key} of {decode} after it gave the lease back")
            wrong = [block for block in blocks if block not in lease.blocks]
            if wrong:
                raise Violation("write without a lease", f"{writer} writes blocks {wrong} for {key} of {decode}, outside of its lease")
            return
        raise Violation("write without a lease", f"{writer} writes for {key} into {owner}, and no lease was given")

    def computed(self, life: "Life", step: Step, took_ns: int) -> None:
        """By the machine, which looks at its own clock."""
        for part in step.parts:
            for address in life.addresses if part.sequence.side == "decode" else ():
                self._computed_ns[address, part.sequence.request_id] += took_ns

    def ledger(self, name: str, ledger: Ledger, flights: list[Flight]) -> None:
        """At the end of a request. Its steps were waited for, each to its end: no less may be theirs."""
        if ledger.violations or ledger[Span.UNACCOUNTED]:
            raise Violation("ledger", f"{name}: {ledger.violations} stamps before the cursor")
        if sum(ledger.spans().values()) != ledger.wall_ns or ledger.cursor_ns > now_ns():
            raise Violation("ledger", f"{name}: spans sum to {sum(ledger.spans().values())} of {ledger.wall_ns}")
        flight = flights[0]
        if len(flights) > 1 or flight.finish is None or flight.decode is None or flight.n_attempts > 1 or flight.resumed:
            return  # several waited for each other, or nobody waited for all of it
        took, said = self._computed_ns[flight.decode, flight.request_id], sum(ledger[span] for span in _STEPS)
        if said < took:
            raise Violation("ledger blames", f"{name}: its steps at {flight.decode} took {took} ns, and the ledger says {said}")

    # --- inside

    def _failures(self, life: "Life", address: Address, message: Displaced) -> int:
        """Attempts that its flight has lost in a row; 0 if there is none."""
        gateway = life.actors[address.actor]
        assert isinstance(gateway, GatewayActor)
        flight = gateway._flights.get(message.request_id)
        return flight.failures if flight is not None else 0

    def _log_goes_on(self, life: "Life", address: Address, key: Key) -> None:
        """If there is one, its grace begins now."""
        actor = life.actors[address.actor]
        if isinstance(actor, DecodeActor) and actor._logs.get(key) is not None:
            self.spoke_s[key[0]] = trio.current_time()

    def _not_cancelled(self, source: Address, key: Key, what: str) -> None:
        if (source, key) in self._cancelled:
            raise Violation("computed after its cancel", f"{source} {what}: {key}")

    def _is_mourned(self, life: "Life", address: Address, dead: Address) -> None:
        """Who knows of a death does nothing for the dead any more."""
        actor = life.actors[address.actor]
        if isinstance(actor, PrefillActor) and dead.actor.startswith("decode/"):
            self._mourned[address, dead] = None
        elif isinstance(actor, DecodeActor):
            for key, entry in actor._entries.items():
                if entry.gateway == dead and entry.state in ("leased", "running"):
                    raise Violation("cancel lost", f"{address} goes on with {key} of {dead}, which is dead")

    def _is_answered(self, life: "Life", address: Address, message: Placed | Tokens) -> None:
        """Mail of an attempt that nobody waits for is answered with its Cancel, unless it has finished."""
        gateway = life.actors[address.actor]
        assert isinstance(gateway, GatewayActor)
        if isinstance(message, Placed):
            flight = gateway._flights.get(message.request_id)
            stale = flight is None or flight.attempt != message.attempt or flight.decode != message.decode
            if flight is not None and flight.decode is not None:
                home = self._homes.setdefault((flight, flight.attempt), flight.decode)
                if flight.decode != home:
                    raise Violation("two places", f"{address} has {message.request_id} at {home}, and now at {flight.decode}")
            keys = [(message.request_id, message.attempt)] if stale else []
        else:
            self._finished.update({(address, row.request_id): None for row in message.rows if row.finish})
            rows = [row for row in message.rows if (address, row.request_id) not in self._finished]
            flights = [(row, gateway._flights.get(row.request_id)) for row in rows if message.source.actor.startswith("decode/")]
            keys = [(row.request_id, row.attempt) for row, flight in flights if flight is None or flight.attempt != row.attempt]
        for key in keys:
            if (address, key) not in self._forwarded:
                raise Violation("cancel lost", f"{address} has mail of {key}, waits for none, and has not said so")

    def _is_leased_rightly(self, life: "Life", address: Address, message: Expect) -> None:
        """A newer attempt ends the older ones here, and takes nothing that a preempted sequence waits for."""
        decode, key = life.actors[address.actor], (message.admit.request_id, message.admit.attempt)
        assert isinstance(decode, DecodeActor)
        if key not in decode._entries or key in self._held:
            return
        for other, entry in decode._entries.items():
            if other[0] == key[0] and other[1] < key[1] and entry.state in ("leased", "running"):
                raise Violation("cancel lost", f"{address} goes on with {other}, and takes {key}")
        counts = life.book.counts()
        if counts.free + counts.cached < life.book._reserved:
            text = f"{life} leases for {key}, and leaves {counts.free + counts.cached} of {life.book._reserved} blocks"
            raise Violation("lease of what is reserved", text)

    def _is_known(self, life: "Life", address: Address, message: Announced) -> None:
        """What a decode actor holds as it announces itself, and still does."""
        router = life.actors[address.actor]
        assert isinstance(router, RouterActor)
        worker = self._world.supervisor.life_of(message.worker)
        decode = worker.actors[message.address.actor] if worker is not None and message.address in worker.addresses else None
        if isinstance(decode, DecodeActor):
            for key, entry in decode._entries.items():
                if entry.router == address and key not in router._places:
                    raise Violation("places", f"{address} knows nothing of {key} at {message.address}, which has announced itself")

    def _has_left(self, life: "Life", address: Address) -> None:
        """A prefill actor that is done with a prompt has told the router so too."""
        actor = life.actors[address.actor]
        if isinstance(actor, PrefillActor):
            for owed in [owed for owed in self._owes_left if owed[0] == address]:
                del self._owes_left[owed]
                if owed not in self._left and actor._router is not None:
                    raise Violation("loads", f"{address} is done with {owed[1]}, and has not told the router")

    def _is_revoked(self, life: "Life", address: Address, key: Key) -> None:
        lease = self._leases.get((address, key))
        if lease is not None and not lease.over and not lease.revoked and life.node.is_alive(lease.holder):
            raise Violation("cancel lost", f"{address} has not revoked the lease of {key} from {lease.holder}")

    def _end_lease(self, source: Address, to: Address, key: Key) -> None:
        lease = self._leases.get((to, key))
        if lease is not None and lease.holder == source:
            lease.over = True

    def _row(self, source: Address, gateway: Address, row: Row) -> None:
        key = row.request_id, row.attempt
        if source.actor.startswith("prefill/"):
            self._first[source, key] = None
            return
        if (source, key) not in self._left:  # else it had ended, and only waited for credit
            self.spoke_s[row.request_id] = trio.current_time()
        expected = self._next.get((source, gateway, key), row.first)
        if row.first != expected and row.first == 0 and self._replays[source, gateway, key]:
            self._replays[source, gateway, key] -= 1
        elif row.first != expected:
            raise Violation("index", f"{source} sends {key} from {row.first}, {expected} is next")
        self._next[source, gateway, key] = row.first + len(row.ids)

    def _nobody_waits_for_nothing(self, router: RouterActor, address: Address) -> None:
        for key in router._queue._aside if router.ready() else ():
            admit = router._queue._waiting[key][1].admit
            n_tokens, most = len(admit.tokens), admit.n_prompt + admit.stopping.max_tokens
            rooms = (router._prefill.values(), n_tokens), (router._decode.values(), most)
            if all(any(n <= worker.n_blocks * worker.block_tokens for worker in workers) for workers, n in rooms):
                raise Violation("waiter forgotten", f"{address} has set {key} aside, and there is room for it")
        first = router._queue.first()
        if first is None or not router.ready():
            return
        most = first.admit.n_prompt + first.admit.stopping.max_tokens
        able = [worker for worker in router._decode.values() if most <= worker.n_blocks * worker.block_tokens]
        decode = [worker for worker in able if not worker.reserve] or able
        idle = all(not worker.placed and not worker.withheld for worker in decode)
        if idle:
            raise Violation("waiter forgotten", f"{address} keeps {first.admit.request_id} waiting though all workers are idle")
