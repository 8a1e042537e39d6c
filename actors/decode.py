"""Decode: owns a KV pool, leases its blocks to prefill workers, and runs the batch: one Tokens frame a step and gateway.

Receives Expect from the router, Scores, Prefilled and Returned from prefill workers, Cancel, Detach and Resume from gateways, and the news
of deaths; sends Placed, Tokens, Displaced and Spent to gateways, Prefill and Revoke to prefill workers, Declined, Left and Withdrawn to
the router. An attempt is leased (somebody else may write its blocks), revoking (given up, but its writer has not said that it stopped),
running (in the engine) or dropping (the engine has been told). Leased blocks come back by Prefilled, Returned or the writer's Down, by
nothing else.

A resumable attempt outlives its gateway for a grace time, and so does the log of its tokens: another gateway takes it over by Resume and is
told everything from the first token on. A gateway whose client left one is told by Spent what it came to. Ends with its worker.
"""

import itertools
import math
from dataclasses import dataclass
from typing import Literal, assert_never

import msgspec
import trio

from relay.clock import now_ns
from relay.engine.engine import Add, Drop, Join
from relay.engine.host import EngineHost
from relay.engine.report import NO_NUMBER, Advance, StepReport
from relay.engine.sequence import Sequence, SequenceId
from relay.engine.token_log import TokenLog, TokenLogs
from relay.errors import DeadlineExceeded, Overloaded, RequestError, RequestTooLarge
from relay.kv.book import BlockBook
from relay.kv.pool import KVPool
from relay.kv.prefix import BlockKey, chain, namespace
from relay.ledger.spans import Span
from relay.messages import (
    Address,
    Announced,
    Cancel,
    Declined,
    DecodeInbox,
    Detach,
    Displaced,
    Down,
    Expect,
    Holding,
    Key,
    Left,
    Logprobs,
    Oversized,
    Placed,
    Prefill,
    Prefilled,
    Refused,
    Resume,
    Returned,
    Revoke,
    Row,
    Scores,
    Spent,
    Trail,
    Up,
    Withdrawn,
)
from relay.policy.cache_index import hints, news
from relay.policy.tombstones import Tombstones
from relay.runtime.node import Context
from relay.runtime.row_parts import with_trail
from relay.runtime.token_outbox import Rows, TokenOutbox

_RESUMED = "another gateway resumed this stream"
_DRAINED = "the decode worker is being drained"
_GATEWAY_COMES_WITHIN_S = 1.5


@dataclass(slots=True)
class Entry:
    """One attempt here. `first` is held back until the engine's first token joins it, so that the two travel in one row."""

    expect: Expect
    router: Address
    prefill: Address | None  # None: it computes its prompt itself
    blocks: list[int]  # found in the cache, then leased
    n_shared: int
    keys: list[BlockKey]
    gateway: Address | None  # None: a resumable one that nobody reads
    log: TokenLog | None
    state: Literal["leased", "revoking", "running", "dropping"] = "leased"
    reader: int = 0  # of those at its gateways, by `Resume.reader`
    answered: bool = False  # to its client's content, by fewer tokens than it might have had
    left_by: Address | None = None  # the gateway that waits to hear what it came to
    scores: tuple[Logprobs, ...] = ()  # of its prompt, as far as they came ahead of it
    first: Row | None = None
    sequence: Sequence | None = None

    @property
    def leased(self) -> list[int]:
        return self.blocks[self.n_shared :]

    @property
    def can_be_resumed(self) -> bool:
        return self.log is not None and self.log.is_kept

    @property
    def key(self) -> Key:
        return self.expect.admit.request_id, self.expect.admit.attempt


class DecodeActor:
    _context: Context
    _outbox: TokenOutbox

    def __init__(
        self,
        host: EngineHost,
        book: BlockBook,
        memory: KVPool,
        worker: str,
        model: str,
        *,
        reserve: bool = False,
        prefills: bool = False,
        grace_s: float = 60.0,
        max_log_bytes: int = 1 << 28,
    ) -> None:
        """`reserve`, `prefills`: see `relay.messages.Announced`. `grace_s`, `max_log_bytes`: see `relay.engine.token_log`."""
        self._host, self._book, self._memory = host, book, memory
        self._worker, self._model, self._reserve, self._prefills = worker, model, reserve, prefills
        self._router: Address | None = None
        self._entries: dict[Key, Entry] = {}
        self._attempts: dict[str, int] = {}  # the newest attempt held of each request
        self._tombstones = Tombstones()
        self._running: dict[SequenceId, Entry] = {}
        self._logs = TokenLogs(grace_s, max_log_bytes)
        self._logged = trio.Event()  # there are some
        self._gateways: dict[Address, None] = {}  # that are up, as far as we were told
        self._gateway_died_s = -math.inf
        self._draining = False
        self._changed = trio.Event()  # what a drain waits for may be there
        host.subscribe(self._on_report)

    async def run(self, context: Context) -> None:
        """Serve until the worker ends."""
        self._context = context
        self._outbox = TokenOutbox(context, exact=self._host.exact)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._outbox.run)
            nursery.start_soon(self._expire)
            async for message in context.inbox:
                self._on(message)  # type: ignore[arg-type]
            nursery.cancel_scope.cancel()

    async def drain(self, within_s: float) -> None:
        """Take nothing more, and give what runs to others, where each goes on with its next token. Return when nothing is left.

        A resumable stream whose reader has gone is kept for the next one, if there is a gateway that may bring him or one has just died:
        for `within_s`.
        """
        self._draining = True
        if self._router is not None:
            self._context.post(self._router, Withdrawn(address=self._context.address))
        give_up_s = trio.current_time() + within_s
        while True:
            until_s = give_up_s if self._gateways else min(give_up_s, self._gateway_died_s + _GATEWAY_COMES_WITHIN_S)
            waits = trio.current_time() < until_s and self._logs.unread()
            for entry in list(self._entries.values()):
                if not waits or entry.gateway is not None:
                    self._hand_on(entry)
            if not waits and not self._entries:
                return
            with trio.move_on_at(until_s if waits else math.inf):
                await self._changed.wait()

    def _hand_on(self, entry: Entry) -> None:
        if entry.state in ("leased", "running"):
            self._displace(entry, _DRAINED, (self._context.address,), drained=True)
            self._cancel(entry)

    def _wake_drain(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    def find_resumable(self, name: str, owner: str = "", secret: str = "") -> list[tuple[Address, str, int, bytes]]:
        """(our address, request_id, attempt, envelope) of the choices that `TokenLogs.find` gives; one of a request has the envelope."""
        return [(self._context.address, *key, envelope) for key, envelope in self._logs.find(name, owner, secret)]

    @property
    def n_log_bytes(self) -> int:
        return self._logs.n_bytes

    def _on(self, message: DecodeInbox) -> None:
        match message:
            case Up():
                if message.address.actor.startswith("router/"):
                    self._announce(message.address)
                elif message.address.actor.startswith("gateway/"):
                    self._gateways[message.address] = None
                    self._context.monitor(message.address)
                    self._wake_drain()
            case Expect():
                self._on_expect(message)
            case Oversized():
                self._on_oversized(message)
            case Scores():
                entry = self._entries.get((message.request_id, message.attempt))
                if entry is not None:
                    entry.scores += message.logprobs
            case Prefilled():
                self._on_prefilled(message)
            case Returned():
                self._on_returned(message)
            case Cancel():
                self._on_cancel(message)
            case Detach():
                self._on_detach(message)
            case Resume():
                self._on_resume(message)
            case Down():
                self._on_down(message)
            case _:
                assert_never(message)

    def _announce(self, router: Address) -> None:
        """A new router learns from us what its predecessor knew; from now on our places are its."""
        self._router = router
        if self._draining:
            return
        holdings = []
        for key, entry in self._entries.items():
            entry.router = router
            holdings.append(Holding(*key, entry.gateway or entry.expect.admit.gateway, entry.prefill, len(entry.blocks)))
        layout = self._memory.layout
        self._context.post(
            router,
            Announced(
                address=self._context.address,
                role="decode",
                worker=self._worker,
                n_blocks=layout.n_blocks,
                block_tokens=layout.block_tokens,
                max_running=self._host.max_running,
                reserve=self._reserve,
                prefills=self._prefills,
                holdings=tuple(holdings),
                cached=hints(self._book.published_keys()),
            ),
        )

    def _on_expect(self, message: Expect) -> None:
        admit, received = message.admit, now_ns()
        key = admit.request_id, admit.attempt
        if self._router is not None and message.router.epoch < self._router.epoch:
            return  # that router is dead: whom it placed with its last breath, its successor places again
        entry = self._entries.get(key)
        if entry is not None:  # a router that came after the one that placed it here
            entry.router = message.router
            self._context.post(
                admit.gateway, Placed(request_id=key[0], attempt=key[1], decode=self._context.address, decision=message.decision)
            )
            return
        if self._draining:
            self._context.post(
                admit.gateway,
                Displaced(request_id=key[0], attempt=key[1], reason=_DRAINED, dead=(self._context.address,), drained=True),
            )
            self._leave(message.router, key, 0, finished=False)
            return
        newest = self._attempts.get(admit.request_id, 0)
        other = self._entries[admit.request_id, newest] if newest else None
        if other is not None and other.gateway not in (None, admit.gateway):  # two gateways each hold a connection to one resumable stream
            if newest > admit.attempt:
                self._context.post(admit.gateway, Displaced(request_id=key[0], attempt=key[1], reason=_RESUMED, lost=True))
            elif other.state in ("leased", "running"):
                self._displace(other, _RESUMED, lost=True)
        if key in self._tombstones or newest > admit.attempt:
            self._leave(message.router, key, 0, finished=False)
            return
        if admit.deadline_ns and admit.deadline_ns < received:
            self._refuse(admit.gateway, key, DeadlineExceeded("the request's time ran out on its way to a place"))
            self._leave(message.router, key, 0, finished=False)
            return
        if other is not None:
            self._cancel(other)
        size = self._memory.layout.block_tokens
        n_reusable = 0 if admit.prompt_logprobs >= 0 else (len(admit.tokens) - 1) // size
        keys = list(chain(namespace(self._model, admit.salt), admit.tokens[: n_reusable * size], size))
        shared = self._book.match(keys, admit.tokens)
        leased = self._book.lease(self._memory.layout.blocks_for(len(admit.tokens)) - len(shared))
        if leased is None:
            self._book.free(shared)
            self._context.post(
                message.router,
                Declined(request_id=key[0], attempt=key[1], decode=self._context.address, n_free_blocks=self._book.n_free()),
            )
            return
        log = None
        if admit.resumable is not None:
            log = self._logs.open(admit)
            self._logged.set()
            if log is None and not admit.again:
                self._book.free(shared + leased)
                self._refuse_resumable(message)
                return
            message = msgspec.structs.replace(message, admit=msgspec.structs.replace(admit, resumable=None, logprobs=()))
        entry = Entry(message, message.router, message.prefill, shared + leased, len(shared), keys, admit.gateway, log)
        self._entries[key] = entry
        self._attempts[admit.request_id] = admit.attempt
        self._context.monitor(admit.gateway)
        self._context.post(
            admit.gateway, Placed(request_id=key[0], attempt=key[1], decode=self._context.address, decision=message.decision)
        )
        trail = (*message.trail, (Span.HOP, received), (Span.KV_LEASE_WAIT, now_ns()))
        if message.prefill is None:
            self._compute_here(entry, trail)
            return
        self._context.monitor(message.prefill)
        self._context.post(
            message.prefill,
            Prefill(
                request_id=key[0],
                attempt=key[1],
                tokens=admit.tokens,
                n_prompt=admit.n_prompt,
                sampling=admit.sampling,
                stopping=admit.stopping,
                gateway=admit.gateway,
                decode=self._context.address,
                blocks=tuple(entry.blocks if self._is_here(message.prefill) else leased),
                pool=self._memory.handle,
                n_present=len(shared) * size,
                lone=admit.lone,
                salt=admit.salt,
                priority=admit.priority,
                deadline_ns=admit.deadline_ns,
                prompt_logprobs=admit.prompt_logprobs,
                trail=trail,
            ),
        )

    def _refuse_resumable(self, message: Expect) -> None:
        """There is no room to remember it. One that has begun goes on, without being resumable; this one has not."""
        admit = message.admit
        text = "too much is remembered of resumable streams (gateway.max_logs_mib); try again later, or leave out X-Relay-Resume"
        self._refuse(admit.gateway, (admit.request_id, admit.attempt), Overloaded(text, retry_after_s=1.0))
        self._leave(message.router, (admit.request_id, admit.attempt), 0, finished=False)

    def _refuse(self, gateway: Address, key: Key, error: RequestError) -> None:
        self._context.post(
            gateway,
            Refused(request_id=key[0], attempt=key[1], code=error.code, message=error.message, retry_after_s=error.retry_after_s),
        )

    def _compute_here(self, entry: Entry, trail: Trail) -> None:
        """A short prompt is not worth a hand-over: its chunks run between our own steps."""
        admit = entry.expect.admit
        self._book.adopt(entry.leased)
        entry.state = "running"
        entry.sequence = self._sequence(entry, list(admit.tokens), entry.n_shared * self._memory.layout.block_tokens, trail)
        self._running[entry.sequence.id] = entry
        self._host.submit(Add(entry.sequence))

    def _is_here(self, prefill: Address) -> bool:
        """Whether that prefill actor computes in our pool."""
        return self._context.is_local(prefill)

    def _sequence(self, entry: Entry, tokens: list[int], n_computed: int, trail: Trail) -> Sequence:
        admit = entry.expect.admit
        return Sequence(
            id=self._host.next_id(),
            side="decode",
            request_id=admit.request_id,
            attempt=admit.attempt,
            tokens=tokens,
            n_prompt=admit.n_prompt,
            sampling=admit.sampling,
            stopping=admit.stopping,
            blocks=list(entry.blocks),
            root=namespace(self._model, admit.salt),
            priority=admit.priority,
            lone=admit.lone,
            n_computed=n_computed,
            prompt_logprobs=admit.prompt_logprobs,
            keys=entry.keys,
            n_published=entry.n_shared,
            trail=list(trail),
        )

    def _on_prefilled(self, message: Prefilled) -> None:
        entry = self._entries.get((message.request_id, message.attempt))
        if entry is None:
            return
        if entry.state == "revoking":
            self._drop(entry)
            return
        if entry.state != "leased":
            return  # said twice
        first, trail = message.first, (*message.first.trail, (Span.HOP, now_ns()))
        entry.first = Row(
            *entry.key, first.first, first.ids, (), first.finish, first.logprobs, first.n_cached, entry.scores or first.prompt_logprobs
        )
        entry.scores = ()
        if first.finish:
            rows: Rows = {}
            self._give(entry, with_trail(entry.first, trail), (), rows)
            self._outbox.send(rows)
            self._drop(entry, n_generated=first.first + 1, finished=True)
            return
        self._book.adopt(entry.leased)
        admit = entry.expect.admit
        entry.state = "running"
        entry.sequence = self._sequence(entry, [*admit.tokens, *first.ids], len(admit.tokens), trail)
        self._running[entry.sequence.id] = entry
        self._host.submit(Join(entry.sequence, message.checksums, len(entry.leased) if message.checksums else 0))

    def _on_returned(self, message: Returned) -> None:
        entry = self._entries.get((message.request_id, message.attempt))
        if entry is None or entry.state not in ("leased", "revoking"):
            return
        if entry.state == "leased":
            self._displace(entry, message.reason or "the prefill worker gave the lease back", convicted=bool(message.reason))
        self._drop(entry)

    def _on_oversized(self, message: Oversized) -> None:
        """A message about this attempt does not fit: it cannot be computed, or told, here or elsewhere."""
        entry = self._entries.get((message.request_id, message.attempt))
        if entry is None:
            return
        if entry.state in ("leased", "running") and entry.gateway is not None:
            self._refuse(
                entry.gateway, entry.key, RequestTooLarge(f"the request is too large to be passed on: {message.reason}; send less")
            )
        if entry.state == "leased" and message.to == entry.prefill:
            self._drop(entry)  # it has never heard of the lease
        else:
            self._cancel(entry)

    def _on_detach(self, message: Detach) -> None:
        key = message.request_id, message.attempt
        entry, log = self._entries.get(key), self._logs.get(key)
        if entry is None:
            self._spent(message.gateway, key, len(log) if log is not None else 0)
        elif entry.gateway != message.gateway:
            self._spent(message.gateway, key, 0, resumed=True)
        else:
            entry.gateway, entry.left_by = None, message.gateway
            if entry.log is not None and entry.can_be_resumed:
                entry.log.orphaned()
            else:
                self._cancel(entry)

    def _spent(self, gateway: Address, key: Key, n_generated: int, *, resumed: bool = False) -> None:
        self._context.post(gateway, Spent(request_id=key[0], attempt=key[1], n_generated=n_generated, resumed=resumed))

    def _on_resume(self, message: Resume) -> None:
        """Everything from the first token on, and then what follows, goes to another gateway."""
        key = message.request_id, message.attempt
        log, entry = self._logs.get(key), self._entries.get(key)
        if log is None:
            gone = Displaced(request_id=key[0], attempt=key[1], reason="its token log is gone", lost=True, reader=message.reader)
            self._context.post(message.gateway, gone)
            return
        if entry is not None and entry.state not in ("leased", "running"):
            entry = None  # given up, and only its blocks are not back yet
        log.adopted()
        self._context.monitor(message.gateway)
        if entry is not None:
            if entry.gateway is not None and entry.gateway != message.gateway:
                self._displace(entry, _RESUMED, lost=True)
            if entry.left_by is not None and entry.left_by != message.gateway:
                self._spent(entry.left_by, key, len(log), resumed=True)
            entry.gateway, entry.reader, entry.left_by = message.gateway, message.reader, None
        if len(log):
            self._outbox.send({message.gateway: [(log.row(key), ())]})
        if entry is None and not log.finish:
            reason = log.displaced or "it was displaced"
            self._context.post(message.gateway, Displaced(request_id=key[0], attempt=key[1], reason=reason, reader=message.reader))
        self._wake_drain()

    def _on_cancel(self, message: Cancel) -> None:
        key = message.request_id, message.attempt
        entry = self._entries.get(key)
        if entry is None:
            self._tombstones.add(key)
        elif entry.log is None or message.gateway in (None, entry.gateway):  # else it has changed hands
            entry.answered = message.answered
            self._cancel(entry)  # its log stays: of several choices one may end at a stop string, and the stream be resumed later

    def _cancel(self, entry: Entry) -> None:
        if entry.state == "leased":
            assert entry.prefill is not None
            entry.state = "revoking"
            self._book.quarantine(entry.leased)
            self._context.post(
                entry.prefill,
                Revoke(request_id=entry.key[0], attempt=entry.key[1], decode=self._context.address),
            )
        elif entry.state == "running":
            entry.state = "dropping"
            assert entry.sequence is not None
            self._host.submit(Drop(entry.sequence.id))

    def _on_down(self, message: Down) -> None:
        """A dead prefill worker writes no more: its leases end. A dead gateway's requests have nobody left."""
        address = message.address
        for entry in list(self._entries.values()):
            if entry.gateway == address and entry.log is not None and entry.can_be_resumed:
                entry.gateway = None
                entry.log.orphaned()
            elif entry.gateway == address:
                self._cancel(entry)
            if entry.prefill == address and entry.state in ("leased", "revoking"):
                if entry.state == "leased":
                    suspect = entry.key[0] in message.suspects
                    self._displace(
                        entry, f"{address} died while it had the prompt", (address,), suspect=suspect, convicted=suspect and message.lone
                    )
                self._drop(entry)
        self._outbox.forget(address)
        if address in self._gateways:
            del self._gateways[address]
            self._gateway_died_s = trio.current_time()
        self._wake_drain()

    def _on_report(self, report: StepReport) -> None:
        rows: Rows = {}
        for number, group in itertools.groupby(report.advances, lambda advance: advance.sequence.id):
            entry = self._running.get(number)
            if entry is None:
                continue
            advances = list(group)
            if entry.state == "running":
                self._give(entry, self._row(entry, advances), report.trail, rows)
            if advances[-1].finish is not None:
                finished = entry.state == "running"
                self._drop(entry, n_generated=advances[-1].sequence.n_generated, finished=finished)
        for sequence, reason in report.refused:
            self._give_up(sequence, reason)
        for sequence in report.failed:
            self._give_up(sequence, NO_NUMBER, convicted=True)
        for sequence in report.gone:
            entry = self._running.get(sequence.id)
            if entry is not None:
                self._drop(entry, n_generated=sequence.n_generated)
        if rows:
            self._outbox.send(rows)
        changes = news(self._worker, self._context.address.epoch, self._book)
        if changes is not None and self._router is not None:
            self._context.post(self._router, changes)

    def _give_up(self, sequence: Sequence, reason: str, *, convicted: bool = False) -> None:
        """The engine has, and has let go of it."""
        entry = self._running.get(sequence.id)
        if entry is not None:
            if entry.state == "running":
                self._displace(entry, reason, convicted=convicted)
            self._drop(entry)

    def _row(self, entry: Entry, advances: list[Advance]) -> Row:
        """Of the tokens that a sequence got in one step."""
        first, advance, key, finish = entry.first, advances[0], entry.key, advances[-1].finish or ""
        admit = entry.expect.admit
        ids = tuple(each.token for each in advances)
        logprobs = tuple(each.logprobs for each in advances if each.logprobs is not None)
        if first is None:
            sequence, starts = advance.sequence, advance.index == len(admit.tokens) - admit.n_prompt
            n_cached = min(sequence.n_cached, sequence.n_prompt) if advance.index == 0 else 0
            scores = tuple(sequence.scores) if starts else ()
            return Row(*key, advance.index, ids, advance.trail, finish, logprobs, n_cached, scores)
        entry.first = None
        return Row(
            *key,
            first.first,
            (*first.ids, *ids),
            advance.trail,
            finish,
            (*first.logprobs, *logprobs),
            first.n_cached,
            first.prompt_logprobs,
        )

    def _give(self, entry: Entry, row: Row, trail: Trail, rows: Rows) -> None:
        """To the log, if it has one, and to the gateway, if there is one."""
        if entry.log is not None:
            self._logs.add(entry.log, row)
        if entry.gateway is not None:
            rows.setdefault(entry.gateway, []).append((row, trail))

    def _displace(
        self,
        entry: Entry,
        reason: str,
        dead: tuple[Address, ...] = (),
        *,
        suspect: bool = False,
        convicted: bool = False,
        lost: bool = False,
        drained: bool = False,
    ) -> None:
        if entry.log is not None and not lost:
            entry.log.displaced = reason
        if entry.gateway is None:
            return
        self._context.post(
            entry.gateway,
            Displaced(
                request_id=entry.key[0],
                attempt=entry.key[1],
                reason=reason,
                dead=dead,
                suspect=suspect,
                convicted=convicted,
                lost=lost,
                drained=drained,
                reader=entry.reader,
            ),
        )

    def _drop(self, entry: Entry, *, n_generated: int = 0, finished: bool = False) -> None:
        """Nobody reads or writes its blocks any more: they are free, and so is its place."""
        del self._entries[entry.key]
        self._tombstones.add(entry.key)  # a router that does not know may send it again
        if entry.log is not None:
            entry.log.end()
        if entry.left_by is not None:
            self._spent(entry.left_by, entry.key, max(n_generated, len(entry.log) if entry.log is not None else 0))
        if self._attempts.get(entry.key[0]) == entry.key[1]:
            del self._attempts[entry.key[0]]
        if entry.sequence is not None:
            del self._running[entry.sequence.id]
            self._book.free(entry.sequence.blocks)
        else:
            self._book.free(entry.blocks)
        self._host.nudge()
        self._wake_drain()
        self._leave(entry.router, entry.key, n_generated, finished=finished or entry.answered)

    async def _expire(self) -> None:
        """A resumable attempt that nobody took over in its grace time has nobody left."""
        while True:
            await self._logged.wait()
            await self._context.sleep(0.25)
            gone = self._logs.expired()
            for key in gone:
                entry = self._entries.get(key)
                if entry is not None:
                    self._cancel(entry)
                self._wake_drain()
            for entry in list(self._entries.values()):
                if entry.gateway is None and not entry.can_be_resumed and entry.key not in gone:
                    self._cancel(entry)  # nobody can come for it any more: its log had to make room
            if len(self._logs) == 0:
                self._logged = trio.Event()

    def _leave(self, router: Address, key: Key, n_generated: int, *, finished: bool) -> None:
        self._context.post(
            router, Left(request_id=key[0], attempt=key[1], address=self._context.address, n_generated=n_generated, finished=finished)
        )
