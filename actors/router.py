"""Router: admits each attempt, or refuses it, and places it on a decode and a prefill worker. Tokens never pass here.

Receives Admit and Cancel from gateways, Announced, Declined and Left from workers, and the news of deaths; sends Expect and Cancel to
decode workers, Refused and Displaced to gateways. Holds nothing that its successor cannot rebuild: gateways send their unplaced Admits
again, workers announce what they hold. A Cancel for a placed attempt follows its Expect on the same road, so cannot overtake it. An Expect
in flight to a worker that dies is nobody's but ours to report, so every place is watched until the decode worker says Left. Ends with its
worker.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import assert_never

import structlog
import trio

from relay.clock import now_ns
from relay.config import Role, RouterConfig
from relay.errors import ContextTooLong, DeadlineExceeded, Overloaded, RequestError, RequestTooLarge
from relay.kv.prefix import BlockKey, chain, namespace
from relay.ledger.spans import Span
from relay.messages import (
    Address,
    Admit,
    Announced,
    Cached,
    Cancel,
    Candidate,
    Convicted,
    Decision,
    Declined,
    Displaced,
    Down,
    Expect,
    Key,
    Left,
    Oversized,
    Refused,
    RouterInbox,
    Up,
    Withdrawn,
)
from relay.policy.cache_index import CacheIndex
from relay.policy.placement import (
    AnswerLengths,
    WorkerLoad,
    blocks_wanted,
    holding_all_of,
    may_compute_for,
    serving,
    weigh_decode,
    weigh_prefill,
)
from relay.policy.poison import PoisonMemory
from relay.policy.queue import Queued, WaitingLine
from relay.policy.tombstones import Tombstones
from relay.policy.weight import admit_bytes
from relay.runtime.node import Context

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Place:
    """Where an attempt is. `admit` None: known from an announcement only."""

    gateway: Address
    decode: Address
    prefill: Address | None
    admit: Admit | None


class RouterActor:
    _context: Context

    def __init__(self, config: RouterConfig, model: str, *, caching: bool = True, room: Mapping[Role, int] | None = None) -> None:
        """`caching`: whether workers keep blocks for who comes later. `room`: tokens that the largest pool of each role is planned to hold;
        it counts though its worker is away for the moment. Whoever announces more is believed."""
        self._config, self._model, self._caching = config, model, caching
        self._prefill: dict[Address, WorkerLoad] = {}
        self._decode: dict[Address, WorkerLoad] = {}
        self._places: dict[Key, Place] = {}
        self._caches: dict[str, tuple[int, CacheIndex]] = {}  # (epoch, what it has) by worker: its actors share one
        self._queue, self._max_queue_bytes = WaitingLine(), int(config.max_queue_mib * (1 << 20))
        self._tombstones = Tombstones()
        self._lengths = AnswerLengths(config.expected_tokens)
        self._hashed: tuple[Queued, int, list[BlockKey]] | None = None  # whose keys were needed last, for blocks of that size
        self._room: dict[Role, int] = dict(room or {})
        self._turn = 0
        self._dead: dict[Address, None] = {}
        self._gateways: dict[str, Address] = {}  # the newest life of each
        self._poison = PoisonMemory()

    async def run(self, context: Context) -> None:
        """Serve until the worker ends."""
        self._context = context
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._expire)
            async for message in context.inbox:
                self._on(message)  # type: ignore[arg-type]
            nursery.cancel_scope.cancel()

    def ready(self) -> bool:
        """Whether a request would be placed."""
        return bool(self._prefill and self._decode)

    @property
    def n_queued(self) -> int:
        return len(self._queue)

    @property
    def n_queued_bytes(self) -> int:
        return self._queue.n_bytes

    @property
    def n_placed(self) -> int:
        return len(self._places)

    def _on(self, message: RouterInbox) -> None:
        match message:
            case Up():
                self._on_up(message.address)
            case Oversized():
                self._on_oversized(message)
            case Announced():
                self._on_announced(message)
            case Withdrawn():
                self._forget_worker(message.address)
                self._place_queued()  # a reserve may have a role now
            case Cached():
                epoch, cache = self._caches.get(message.worker, (0, None))
                if cache is not None and epoch == message.epoch:  # else it is of a life that is over
                    cache.change(message.added, message.removed)
            case Admit():
                self._on_admit(message)
            case Declined():
                self._on_declined(message)
            case Left():
                self._on_left(message)
            case Cancel():
                self._on_cancel(message)
            case Down():
                self._on_down(message)
            case Convicted():
                self._on_convicted(message)
            case _:
                assert_never(message)

    def _on_up(self, address: Address) -> None:
        """Workers announce themselves. A gateway is told what to refuse."""
        if address.actor.startswith("gateway/"):
            self._gateways[address.actor] = address
            for known, until_ns in self._poison:
                self._context.post(address, Convicted(digest=known, until_ns=until_ns))

    def _on_convicted(self, message: Convicted) -> None:
        """All gateways hear of it, the one that said it too: it knows already."""
        if self._poison.add(message.digest, message.until_ns):
            for gateway in self._gateways.values():
                self._context.post(gateway, message)

    def _on_announced(self, message: Announced) -> None:
        if message.address in self._dead:
            return
        worker = WorkerLoad(
            message.address,
            message.worker,
            message.n_blocks,
            message.block_tokens,
            message.max_running,
            message.reserve,
            message.prefills,
        )
        workers = self._prefill if message.role == "prefill" else self._decode
        workers[message.address] = worker
        if not message.reserve:
            self._room[message.role] = max(self._room.get(message.role, 0), worker.n_tokens)
        self._queue.bring_back()  # it may have the room that they wait for
        if message.address.epoch >= self._caches.get(message.worker, (0, None))[0]:  # else its life is over, which we have yet to hear
            self._caches[message.worker] = message.address.epoch, CacheIndex(message.cached)
        self._context.monitor(message.address)
        for holding in message.holdings:
            key = holding.request_id, holding.attempt
            worker.place(key, holding.n_blocks)
            before = self._places.get(key)  # our own choice, before we heard of this one
            if before is not None and before.prefill in self._prefill:
                self._leave(self._prefill[before.prefill], key)
            self._places[key] = Place(holding.gateway, message.address, holding.prefill, None)
            self._queue.remove(key)
        self._place_queued()

    def _on_admit(self, message: Admit) -> None:
        key = message.request_id, message.attempt
        if key in self._places and self._places[key].decode in message.dead:
            self._forget(key)  # it died there, and its gateway has never heard of it
        if key in self._places or key in self._queue or key in self._tombstones:
            return  # a gateway that repeats itself after a death, or that has cancelled it
        for address in message.dead:
            self._dead[address] = None
            self._forget_worker(address)
        if self._queue.n_bytes + admit_bytes(message) > self._max_queue_bytes and not message.again:
            text = f"the requests that are waiting already take {self._queue.n_bytes >> 20} MiB; try again later"
            self._refuse(message, Overloaded(text, retry_after_s=1.0))
            self._place_queued()  # of those that are known dead since, others may take the roles
            return
        self._queue.add(Queued(message, now_ns()))
        self._place_queued()
        n_waiting = self._queue.n_requests - 1  # beside its own
        if n_waiting >= self._config.max_queue and not message.again and self._queue.remove(key) is not None:
            self._refuse(message, Overloaded(f"{n_waiting} requests are waiting already; try again later", retry_after_s=1.0))

    def _place_queued(self) -> None:
        """In order: who does not fit is not overtaken for ever, unless no worker that is here could ever hold it."""
        while self.ready() and (queued := self._queue.first()) is not None:
            n_tokens, most = len(queued.admit.tokens), queued.admit.n_prompt + queued.admit.stopping.max_tokens
            prefill, decode = holding_all_of(self._prefill.values(), n_tokens), holding_all_of(self._decode.values(), most)
            if self._refuse_endless(queued.admit, n_tokens, most):
                self._queue.remove(queued.key)
            elif not prefill or not decode:
                self._queue.set_aside(queued.key)
            elif self._place(queued, serving(prefill), serving(decode)):
                self._queue.place(queued.key)
            else:
                return

    def _refuse_endless(self, admit: Admit, n_tokens: int, most: int) -> bool:
        """Whether it is larger than the largest pool. Judged by the plan and not by who lives: what a restarting worker has room for
        waits for it."""
        needs: tuple[tuple[Role, int, str], ...] = (("decode", most, "prompt and max_tokens"), ("prefill", n_tokens, "the prompt"))
        for role, need, what in needs:
            room = self._room.get(role, 0)
            if room and need > room:
                text = f"{what} need {need} tokens of KV memory; the largest pool holds {room}: ask for less"
                self._refuse(admit, ContextTooLong(text, param="max_tokens"))
                return True
        return False

    def _place(self, queued: Queued, able_prefill: Sequence[WorkerLoad], able_decode: Sequence[WorkerLoad]) -> bool:
        """Whether it got a place with one of these."""
        admit, started = queued.admit, now_ns()
        n_tokens, max_more = len(admit.tokens), admit.stopping.max_tokens - (len(admit.tokens) - admit.n_prompt)
        block_tokens = next(iter(self._decode.values())).block_tokens
        n_blocks = blocks_wanted(n_tokens, max_more, self._lengths.p90(), self._config.kv_overcommit, block_tokens)
        keys = self._keys(queued, block_tokens)
        decision = self._decide(able_prefill, able_decode, n_tokens, n_blocks, keys)
        if not decision.decode:
            return False
        decode = self._decode[decision.decode[0].address]
        prefill = self._prefill[decision.prefill[0].address] if decision.prefill else None
        key = admit.request_id, admit.attempt
        decode.place(key, n_blocks)
        if prefill is not None:
            n_cached = min(n_tokens, decision.prefill[0].n_cached)
            prefill.place(key, n_tokens - n_cached, keys, n_cached // block_tokens)
        self._places[key] = Place(admit.gateway, decode.address, prefill.address if prefill else None, admit)
        self._context.monitor(admit.gateway)
        trail = (*admit.trail, (Span.HOP, queued.received_ns), (Span.PREFILL_QUEUE_CAPACITY, started), (Span.ROUTE_DECIDE, now_ns()))
        self._context.post(
            decode.address,
            Expect(
                admit=admit,
                prefill=prefill.address if prefill else None,
                router=self._context.address,
                decision=decision,
                trail=trail,
            ),
        )
        return True

    def _keys(self, queued: Queued, block_tokens: int) -> list[BlockKey]:
        """Of the blocks that may be found in a cache. Whoever waits in front is looked at again with every message, and hashed once."""
        if self._config.placement != "kv_aware" or not self._caching:
            return []
        if self._hashed is None or self._hashed[0] is not queued or self._hashed[1] != block_tokens:
            admit = queued.admit
            n_full = (len(admit.tokens) - 1) // block_tokens
            keys = list(chain(namespace(self._model, admit.salt), admit.tokens[: n_full * block_tokens], block_tokens))
            self._hashed = queued, block_tokens, keys
        return self._hashed[2]

    def _decide(
        self,
        able_prefill: Sequence[WorkerLoad],
        able_decode: Sequence[WorkerLoad],
        n_tokens: int,
        n_blocks: int,
        keys: list[BlockKey],
    ) -> Decision:
        """Candidates of both roles, best first; no decode candidate if none has room, no prefill one if decode does it by itself."""
        rule: str = self._config.placement
        if rule == "round_robin":
            return self._by_turn(able_prefill, able_decode, n_tokens, n_blocks)

        def n_cached(worker: WorkerLoad) -> int:
            return self._caches[worker.worker][1].n_blocks(keys, worker.coming) * worker.block_tokens

        prefill = weigh_prefill(able_prefill, n_tokens, n_cached)
        decode = weigh_decode(able_decode, n_blocks, n_cached)
        home = self._prefill[prefill[0].address].worker
        together = [candidate for candidate in decode if self._decode[candidate.address].worker == home]
        if together:  # an aggregated worker: nothing has to move
            decode.remove(together[0])
            decode.insert(0, together[0])
        if decode:
            prefill = self._without_cycles(prefill, decode[0])
        if not together and decode and n_tokens - decode[0].n_cached <= self._config.local_prefill_tokens:
            rule, prefill = f"{rule}, short enough for decode alone", []
        return Decision(rule, tuple(prefill[:4]), tuple(decode[:4]))

    def _by_turn(self, able_prefill: Sequence[WorkerLoad], able_decode: Sequence[WorkerLoad], n_tokens: int, n_blocks: int) -> Decision:
        prefill = sorted(weigh_prefill(able_prefill, n_tokens, lambda worker: 0), key=lambda c: c.address)
        decode = sorted(weigh_decode(able_decode, n_blocks, lambda worker: 0), key=lambda c: c.address)
        if decode:
            first, second = self._turn % len(prefill), self._turn % len(decode)
            prefill, decode = prefill[first:] + prefill[:first], decode[second:] + decode[:second]
            prefill = self._without_cycles(prefill, decode[0])
            self._turn += 1
        return Decision("round_robin", tuple(prefill[:4]), tuple(decode[:4]))

    def _without_cycles(self, prefill: list[Candidate], decode: Candidate) -> list[Candidate]:
        """Those that may compute for this decode worker; none if it has to by itself."""
        return [each for each in prefill if may_compute_for(self._prefill[each.address], self._decode[decode.address])]

    def _on_declined(self, message: Declined) -> None:
        """We thought there was room (a new router knows less than the pool): it goes first when there is."""
        key = message.request_id, message.attempt
        decode, place = self._decode.get(message.decode), self._places.get(key)
        if place is None or place.decode != message.decode:  # another held it already, and has said so since
            if decode is not None:
                decode.leave(key)
                self._place_queued()
            return
        self._forget(key)
        if place.admit is None or key in self._tombstones:
            return
        if decode is not None:
            decode.withheld = max(0, decode.n_blocks - message.n_free_blocks - decode.load)
        self._queue.add(Queued(place.admit, now_ns(), declined=True))

    def _on_left(self, message: Left) -> None:
        key = message.request_id, message.attempt
        place = self._places.get(key)
        prefill = self._prefill.get(message.address)
        if prefill is not None:
            decode = self._decode.get(place.decode) if place is not None else None
            if decode is not None and decode.worker == prefill.worker:
                prefill.computed(key)  # its blocks are published once decode has joined it
            else:
                self._leave(prefill, key)
            return
        if place is not None and place.decode == message.address:
            self._forget(key)
        if message.address in self._decode:
            self._decode[message.address].leave(key)  # two may have held it for a while, and said so to a new router
            self._decode[message.address].withheld = 0
        if message.finished:
            self._lengths.saw(message.n_generated)
        self._place_queued()

    def _on_cancel(self, message: Cancel) -> None:
        key = message.request_id, message.attempt
        self._tombstones.add(key)  # it may be declined, and an Admit that waited for credit comes behind its Cancel
        if self._queue.remove(key) is not None:
            self._place_queued()
            return
        place = self._places.get(key)
        if place is not None:
            self._context.post(place.decode, message)

    def _on_down(self, message: Down) -> None:
        address = message.address
        self._dead[address] = None
        self._forget_worker(address)
        for key, queued in self._queue:
            if queued.admit.gateway == address:
                self._queue.remove(key)
        for key, place in list(self._places.items()):
            if place.decode == address:
                self._forget(key)
                self._tombstones.add(key)  # its gateway may repeat the Admit before it hears this, and not as the suspect that it is
                suspect = key[0] in message.suspects
                self._context.post(
                    place.gateway,
                    Displaced(
                        request_id=key[0],
                        attempt=key[1],
                        reason=f"{address} died",
                        dead=(address,),
                        suspect=suspect,
                        convicted=suspect and message.lone,
                    ),
                )
        self._place_queued()

    def _forget_worker(self, address: Address) -> None:
        """Dead, drained, or said to be, and with it all actors of its process and their cache, unless a successor has announced another."""
        gone = self._prefill.get(address) or self._decode.get(address)
        if gone is None:
            return
        successor = False
        for workers in (self._prefill, self._decode):
            for other in [other for other in workers.values() if other.worker == gone.worker]:
                if other.address.epoch == address.epoch:
                    del workers[other.address]
                else:
                    successor = True
        if not successor:
            self._caches.pop(gone.worker, None)

    def _forget(self, key: Key) -> Place | None:
        place = self._places.pop(key, None)
        if place is not None:
            for load in (self._decode.get(place.decode), self._prefill.get(place.prefill) if place.prefill else None):
                if load is not None:
                    self._leave(load, key)
        return place

    def _leave(self, load: WorkerLoad, key: Key) -> None:
        load.leave(key, self._caches[load.worker][1])

    def _refuse(self, admit: Admit, error: RequestError) -> None:
        self._context.post(
            admit.gateway,
            Refused(
                request_id=admit.request_id,
                attempt=admit.attempt,
                code=error.code,
                message=error.message,
                retry_after_s=error.retry_after_s,
            ),
        )

    def _on_oversized(self, message: Oversized) -> None:
        place = self._forget((message.request_id, message.attempt))
        if place is not None and place.admit is not None:
            self._refuse(place.admit, RequestTooLarge(f"the request is too large to be passed on: {message.reason}; send less"))
        self._place_queued()

    async def _expire(self) -> None:
        """What no message brings: waits that were too long, deadlines, room that came back unseen."""
        while True:
            await self._context.sleep(0.25)
            for worker in self._decode.values():
                worker.withheld = 0
            self._place_queued()
            now = now_ns()
            limit = now - int(self._config.queue_timeout_s * 1e9)
            for key, queued in self._queue:
                if queued.received_ns < limit:
                    self._queue.remove(key)
                    text = f"no worker had a place for {self._config.queue_timeout_s:g} s; try again later"
                    self._refuse(queued.admit, Overloaded(text, retry_after_s=5.0))
                elif queued.admit.deadline_ns and queued.admit.deadline_ns < now:
                    self._queue.remove(key)
                    self._refuse(queued.admit, DeadlineExceeded("the request's time ran out while it waited for a place"))
            self._place_queued()  # who waited behind those that are gone now has a turn at once
