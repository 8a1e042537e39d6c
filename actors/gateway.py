"""Gateway: the one owner of each request's fate, from submission to its one ending.

Owns the flights: prompt, parameters, attempt number and the journal of token ids. Receives Placed, Tokens, Refused, Displaced and Spent,
and the news of deaths; sends Admit to the router and Cancel to the decode worker (to the router until the request is placed). All deaths
take one road: the next attempt, with the tokens so far. Mail of an attempt that is not the present one is answered with Cancel, which
cleans up what a death left behind. A request that killed workers is remembered for a while by all gateways (Convicted, by way of the
router), and refused when it comes again. HTTP tasks call `submit`, wait on the flight, and call `close`. Ends with its worker.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import assert_never

import structlog
import trio

from relay import errors
from relay.clock import now_ns
from relay.errors import LaneFull, Overloaded, PoisonRequest, RequestError, RequestTooLarge, StreamLost, Unavailable
from relay.ledger.ledger import Ledger
from relay.ledger.spans import Span
from relay.messages import (
    Address,
    Admit,
    Cancel,
    Convicted,
    Decision,
    Detach,
    Displaced,
    Down,
    FinishReason,
    GatewayInbox,
    Key,
    Logprobs,
    Oversized,
    Placed,
    Refused,
    Resumable,
    Resume,
    Row,
    Sampling,
    Spent,
    Stopping,
    Tokens,
    Up,
)
from relay.policy.poison import PoisonMemory, digests
from relay.runtime.mailbox import AtOnce
from relay.runtime.node import Context

log = structlog.get_logger()

_REFUSALS = {
    error.code: error
    for error in (
        errors.ContextTooLong,
        errors.Overloaded,
        errors.DeadlineExceeded,
        errors.InvalidRequest,
        errors.Draining,
        errors.RequestTooLarge,
    )
}


class Bell:
    """Rings when any of the flights that share it has news."""

    def __init__(self) -> None:
        self._event = trio.Event()

    def ring(self) -> None:
        self._event.set()

    async def wait(self) -> None:
        """Return once it has rung since the last return."""
        await self._event.wait()
        self._event = trio.Event()


@dataclass(slots=True, eq=False)
class Flight:
    """One sequence on its way: what a client asked for (one choice of it) and what has come of it.

    ids, logprobs: the journal, by index. finish or error is set exactly once; then nothing more comes.
    """

    request_id: str
    prompt: tuple[int, ...]
    sampling: Sampling
    stopping: Stopping
    ledger: Ledger
    bell: Bell
    salt: str = ""
    priority: int = 0
    deadline_ns: int = 0
    prompt_logprobs: int = -1
    resumable: Resumable | None = None
    door: Bell | None = None  # rings where it may wait no longer for a place
    ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    scores: list[Logprobs] = field(default_factory=list)
    n_cached: int = 0
    finish: FinishReason | None = None
    error: RequestError | None = None
    attempt: int = 1
    n_attempts: int = 1  # of ours; `attempt` may leave numbers out
    failures: int = 0  # attempts in a row that gained no token
    suspect: bool = False  # a worker died in a step that held it, and it has gained no token since
    resumed: bool = False  # taken over: those who had it before may have used any of the next attempt numbers
    awaits_log: bool = False  # its tokens from the first on are still to come
    reader: int = 0  # `Resume.reader` of the present attempt, where it was taken over
    decode: Address | None = None
    dead: tuple[Address, ...] = ()
    decisions: list[Decision] = field(default_factory=list)  # of each attempt that was placed
    exact: bool = True  # whoever computed its tokens gives the same bits in any batch
    token_ns: list[int] = field(default_factory=list)  # when each token came, for inter-token latency

    @property
    def ended(self) -> bool:
        return self.finish is not None or self.error is not None

    @property
    def waits(self) -> bool:
        """Whether it has neither a place yet nor anything to show for one."""
        return self.decode is None and not self.ids and not self.ended

    def ring(self) -> None:
        """There is news of it."""
        self.bell.ring()
        if self.door is not None:
            self.door.ring()


@dataclass(slots=True)
class _Left:
    """A resumable attempt that goes on at `decode` without its client, and who is to hear what it came to: tokens, and whether another
    gateway has it."""

    decode: Address
    n_tokens: int
    on_spent: Callable[[int, bool], None]


class GatewayActor:
    _context: Context

    def __init__(self, *, max_attempts: int, on_event: Callable[[str], None], poison_memory_s: float = 600.0) -> None:
        """`on_event` counts what happens: admitted, retried, stale mail, violation (a token came twice and differed, or one is missing),
        poison (a request that killed workers came again)."""
        self._max_attempts, self._on_event = max_attempts, on_event
        self._poison, self._poison_memory_ns = PoisonMemory(), int(poison_memory_s * 1e9)
        self._flights: dict[str, Flight] = {}
        self._left: dict[Key, _Left] = {}
        self._router: Address | None = None
        self._closing: RequestError | None = None  # what every flight ends in from now on

    async def run(self, context: Context) -> None:
        """Serve until the worker ends; whatever still flies then ends in a typed error."""
        self._context = context
        context.inbox.take_at_once(AtOnce(Tokens, self._on_tokens))
        try:
            async for message in context.inbox:
                self._on(message)  # type: ignore[arg-type]
        finally:
            context.inbox.take_at_once(None)
            self.end_all(Unavailable("the gateway stopped; try again"))

    @property
    def n_flights(self) -> int:
        return len(self._flights)

    def submit(self, flight: Flight, *, later: bool = False) -> None:
        """Start it; or end it at once, if the router is too far behind. What has started is never refused for that, nor are `later` choices
        of a request that has been taken."""
        self._flights[flight.request_id] = flight
        self._on_event("admitted")
        if self._closing is not None:
            self._end(flight, error=self._closing)
        elif not self._poison.is_empty(now_ns()) and any(self._poison.holds(known, now_ns()) for known in _digests(flight)):
            self._refuse_poison(flight)
        elif self._router is not None and later:
            self._context.post(self._router, self._admission(flight, again=True))
        elif self._router is not None:
            try:
                self._context.offer(self._router, self._admission(flight, again=False))
            except LaneFull:
                self._end(flight, error=Overloaded("the router is behind; try again later", retry_after_s=1.0))

    def close(self, flight: Flight, reason: str, *, answered: bool = False) -> None:
        """Nobody wants more of it (a stop string, a client that left, a deadline): stop it wherever it is. Idempotent.

        `answered`: its client has a whole answer.
        """
        if self._remove(flight) and not flight.ended:
            self._cancel(flight, reason, answered=answered)

    def leave(self, flight: Flight, reason: str, on_spent: Callable[[int, bool], None] = lambda n, resumed: None) -> None:
        """Its client has gone. A resumable one that is placed goes on for a while, for whoever takes it over; any other ends.

        Of one that goes on `on_spent` hears once how many tokens it came to, and whether it was resumed by another connection.
        """
        if not self.goes_on(flight) or flight.decode is None:
            self.close(flight, reason)
            return
        self._remove(flight)
        self._left[flight.request_id, flight.attempt] = _Left(flight.decode, len(flight.ids), on_spent)
        self._context.post(flight.decode, Detach(request_id=flight.request_id, attempt=flight.attempt, gateway=self._context.address))

    def goes_on(self, flight: Flight) -> bool:
        """Whether it would, without its client."""
        here = self._flights.get(flight.request_id) is flight
        return here and flight.resumable is not None and flight.decode is not None and not flight.ended

    def take_over(self, flight: Flight, decode: Address) -> None:
        """Continue a flight that another gateway began: its decode worker will tell all tokens from the first on."""
        before = self._flights.get(flight.request_id)
        if before is not None:
            self._end(before, error=StreamLost("another connection resumed this stream"))
        self._flights[flight.request_id] = flight
        flight.decode, flight.resumed, flight.awaits_log, flight.reader = decode, True, True, now_ns()
        self._spend((flight.request_id, flight.attempt), 0, resumed=True)
        self._context.monitor(decode)
        self._context.post(
            decode,
            Resume(request_id=flight.request_id, attempt=flight.attempt, gateway=self._context.address, reader=flight.reader),
        )

    def end_all(self, error: RequestError) -> None:
        """Whatever still flies or is yet to start ends in this error; what can be resumed elsewhere goes on for a while."""
        self._closing = error
        for flight in list(self._flights.values()):
            self.leave(flight, error.code)
            self._end(flight, error=error)

    def _cancel(self, flight: Flight, reason: str, *, answered: bool = False) -> None:
        to, us = flight.decode or self._router, self._context.address
        if to is not None:
            cancel = Cancel(request_id=flight.request_id, attempt=flight.attempt, reason=reason, gateway=us, answered=answered)
            self._context.post(to, cancel)

    def _admit(self, flight: Flight) -> None:
        """Again. Without a router it waits for one to come up."""
        self._on_event("retried")
        if self._router is not None:
            self._context.post(self._router, self._admission(flight, again=True))

    def _admission(self, flight: Flight, *, again: bool) -> Admit:
        return Admit(
            request_id=flight.request_id,
            attempt=flight.attempt,
            tokens=(*flight.prompt, *flight.ids),
            n_prompt=len(flight.prompt),
            sampling=flight.sampling,
            stopping=flight.stopping,
            gateway=self._context.address,
            lone=flight.suspect,
            salt=flight.salt,
            priority=flight.priority,
            deadline_ns=flight.deadline_ns,
            prompt_logprobs=flight.prompt_logprobs if not flight.ids or flight.resumable is not None else -1,
            resumable=flight.resumable,
            logprobs=tuple(flight.logprobs) if flight.resumable is not None else (),
            again=again,
            dead=flight.dead,
            trail=((Span.GATEWAY_QUEUE, now_ns()),),
        )

    def _on(self, message: GatewayInbox) -> None:
        match message:
            case Up():
                self._on_up(message.address)
            case Placed():
                self._on_placed(message)
            case Tokens():
                self._on_tokens(message)
            case Refused():
                self._on_refused(message)
            case Displaced():
                self._on_displaced(message)
            case Spent():
                self._spend((message.request_id, message.attempt), message.n_generated, resumed=message.resumed)
            case Oversized():
                flight = self._current(message.request_id, message.attempt)
                if flight is not None:
                    self._end(flight, error=RequestTooLarge(f"the request is too large to be passed on: {message.reason}; send less"))
            case Down():
                self._on_down(message)
            case Convicted():
                self._on_convicted(message)
            case _:
                assert_never(message)

    def _on_up(self, address: Address) -> None:
        if address.actor.startswith("decode/"):
            self._context.monitor(address)  # it may hold a flight of ours, and die before we hear of it
        elif address.actor.startswith("router/"):
            self._router = address
            self._context.monitor(address)
            for known, until_ns in self._poison:
                self._context.post(address, Convicted(digest=known, until_ns=until_ns))
            for flight in list(self._flights.values()):
                if flight.decode is None:
                    self._admit(flight)

    def _on_placed(self, message: Placed) -> None:
        flight = self._current(message.request_id, message.attempt)
        if flight is None or flight.decode not in (None, message.decode):
            self._refuse_mail(message.decode, message.request_id, message.attempt)
            return
        if flight.decode is None:
            flight.decisions.append(message.decision)
        flight.decode = message.decode
        if flight.door is not None:
            flight.door.ring()
        self._context.monitor(message.decode)

    def _on_tokens(self, message: Tokens) -> None:
        now = now_ns()
        for row in message.rows:
            flight = self._current(row.request_id, row.attempt)
            if flight is None:
                if not message.source.actor.startswith("prefill/"):
                    self._refuse_mail(message.source, row.request_id, row.attempt)
                continue
            flight.exact &= message.exact
            ledger = flight.ledger
            ledger.fold(row.trail)
            ledger.fold(message.trail)
            ledger.close(Span.HOP, now)
            self._take(flight, row, now, message.source)

    def _take(self, flight: Flight, row: Row, now: int, source: Address) -> None:
        """Tokens are indexed: the next ones are taken, those already here are dropped (and compared)."""
        known = len(flight.ids)
        if flight.awaits_log and (row.first > known or source.actor.startswith("prefill/")):
            return  # sent before its decode worker knew of us, and told again by it; a prefill worker's comes by another road
        if row.first > known:
            log.error("tokens are missing", request_id=flight.request_id, attempt=row.attempt, first=row.first, expected=known)
            self._on_event("violation")
            return
        flight.awaits_log = False
        overlap = known - row.first
        if tuple(flight.ids[row.first :][: len(row.ids)]) != row.ids[:overlap]:
            log.error("a token came twice and differed", request_id=flight.request_id, attempt=row.attempt, first=row.first)
            self._on_event("violation")
        fresh = row.ids[overlap:]
        if fresh:
            flight.ids += fresh
            flight.logprobs += row.logprobs[overlap:]
            flight.token_ns += [now] * len(fresh)
            flight.failures = 0
            flight.suspect = flight.suspect and source.actor.startswith("prefill/")  # a prompt that was computed acquits of nothing yet
        n_scores = len(flight.scores)
        if row.prompt_logprobs and row.scores_from <= n_scores:
            flight.scores += row.prompt_logprobs[n_scores - row.scores_from :]
        if not known:
            flight.n_cached = row.n_cached
        if row.finish:
            self._remove(flight)
            flight.finish = row.finish
        flight.ring()

    def _on_refused(self, message: Refused) -> None:
        flight = self._current(message.request_id, message.attempt)
        if flight is not None:
            flight.ledger.fold(((Span.PREFILL_QUEUE_CAPACITY, now_ns()),))
            kind = _REFUSALS.get(message.code, Unavailable)
            self._end(flight, error=kind(message.message, retry_after_s=message.retry_after_s))

    def _on_displaced(self, message: Displaced) -> None:
        flight = self._current(message.request_id, message.attempt)
        if flight is not None and message.reader not in (None, flight.reader):
            return  # to one who read it before
        if flight is not None and message.lost:
            self._end(flight, error=StreamLost(f"the stream cannot be resumed: {message.reason}"))
        elif flight is not None:
            self._retry(flight, message.reason, message.dead, suspect=message.suspect, convicted=message.convicted, drained=message.drained)

    def _on_down(self, message: Down) -> None:
        """A dead router: what is placed goes on, the rest waits for the next one. A dead decode worker: try again elsewhere.

        A flight without a place may have been there too: what it said to us can be lost though the router has heard that it is done.
        """
        address = message.address
        if address == self._router:
            self._router = None
        for key, left in list(self._left.items()):
            if left.decode == address:
                self._spend(key, 0)
        for flight in list(self._flights.values()):
            suspect, told = flight.request_id in message.suspects, address in flight.dead
            if flight.ended:
                pass  # convicted with one of the same just now
            elif flight.decode == address or (flight.decode is None and suspect and not told):
                self._retry(flight, f"{address} died", (address,), suspect=suspect, convicted=suspect and message.lone)
            elif flight.decode is None and address.actor.startswith("decode/") and not told:
                flight.dead = (*flight.dead, address)
                self._admit(flight)

    def _retry(
        self, flight: Flight, reason: str, dead: tuple[Address, ...], *, suspect: bool, convicted: bool, drained: bool = False
    ) -> None:
        """The next attempt; unless it died alone on trial, or too many died without a token in between. A drain is no failure."""
        flight.ledger.lose(now_ns())
        flight.failures += not drained
        flight.dead = tuple(dict.fromkeys(flight.dead + dead))
        log.warning("attempt lost", request_id=flight.request_id, attempt=flight.attempt, reason=reason, tokens=len(flight.ids))
        flight.suspect = flight.suspect or suspect
        if convicted:
            died = "each worker that computed this request died of it, the last one with nothing else in its step"
            self._end(flight, error=PoisonRequest(died if suspect else reason))
            if suspect and self._poison_memory_ns:
                self._convict(Convicted(digest=_digests(flight)[bool(flight.ids)], until_ns=now_ns() + self._poison_memory_ns))
            return
        if flight.failures >= self._max_attempts:
            text = f"{flight.failures} attempts in a row failed; the last: {reason}. Try again later"
            self._end(flight, error=Unavailable(text, retry_after_s=5.0))
            return
        flight.attempt, flight.decode = flight.attempt + 1 if not flight.resumed else now_ns(), None
        flight.n_attempts, flight.reader = flight.n_attempts + 1, 0
        self._admit(flight)

    def _convict(self, news: Convicted) -> None:
        if self._router is not None:
            self._context.post(self._router, news)
        self._on_convicted(news)

    def _on_convicted(self, message: Convicted) -> None:
        """What is under way of the same ends too: it would be the next to kill."""
        if self._poison.add(message.digest, message.until_ns):
            for flight in list(self._flights.values()):
                if message.digest in _digests(flight):
                    self._cancel(flight, PoisonRequest.code)
                    self._refuse_poison(flight)

    def _refuse_poison(self, flight: Flight) -> None:
        self._on_event("poison")
        self._end(
            flight, error=PoisonRequest("this request was sent before and killed the workers that computed it; it is not tried again")
        )

    def _end(self, flight: Flight, *, error: RequestError) -> None:
        self._remove(flight)
        flight.error = error
        flight.ring()

    def _spend(self, key: Key, n_tokens: int, *, resumed: bool = False) -> None:
        left = self._left.pop(key, None)
        if left is not None:
            left.on_spent(max(n_tokens, left.n_tokens), resumed)

    def _remove(self, flight: Flight) -> bool:
        """Whether it was there; another with its id, that resumed its stream, stays."""
        if self._flights.get(flight.request_id) is not flight:
            return False
        del self._flights[flight.request_id]
        return True

    def _current(self, request_id: str, attempt: int) -> Flight | None:
        flight = self._flights.get(request_id)
        return flight if flight is not None and flight.attempt == attempt else None

    def _refuse_mail(self, sender: Address, request_id: str, attempt: int) -> None:
        """Mail of an attempt that nobody waits for: its sender is told to stop."""
        self._on_event("stale")
        self._context.post(
            sender, Cancel(request_id=request_id, attempt=attempt, reason="not the present attempt", gateway=self._context.address)
        )


def _digests(flight: Flight) -> tuple[bytes, bytes]:
    return digests(flight.prompt, flight.sampling, flight.prompt_logprobs)
