"""The HTTP task that serves one connection: what `relay.http.generate` does with flights, without text.

It submits or takes over, pumps, waits for the bell, closes. It lives in the gateway's process and dies with it.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import trio

from relay.actors.gateway import Bell, Flight, GatewayActor
from relay.auth.caller import Caller
from relay.clock import now_ns
from relay.errors import DeadlineExceeded, RequestError, StreamLost
from relay.http.limits import Meter
from relay.ledger.ledger import Ledger
from relay.ledger.spans import Span
from relay.messages import Address, Limits, Resumable
from relay.simulation.scenario import Visit, Wish
from relay.simulation.violation import Violation

if TYPE_CHECKING:
    from relay.simulation.life import Life
    from relay.simulation.world import World

Outcome = Literal["", "answered", "failed", "left", "broken"]
Held = dict[str, tuple[Address, int]]  # by request_id of each choice: the decode worker that knows it, its attempt


class Connection:
    """`outcome` is empty while it lasts; `error` is what the client was told, if it failed."""

    def __init__(self, world: "World", life: "Life", name: str, visit: Visit, deadline_ns: int) -> None:
        self.world, self.life, self.name, self.visit, self.deadline_ns = world, life, name, visit, deadline_ns
        actor = next(iter(life.actors.values()))
        assert isinstance(actor, GatewayActor)
        self._gateway = actor
        self.bell, self.ledger = Bell(), Ledger(now_ns())
        self.flights = [self._flight(i, wish) for i, wish in enumerate(visit.wishes)]
        self.outcome: Outcome = ""
        self.error: RequestError | None = None
        self.placed: dict[str, Address] = {}  # where its flights were when it ended
        self.ended_s = 0.0
        self.done = trio.Event()
        self.caller = Caller(name=visit.key or None, limits=world.scenario.limits.get(visit.key, Limits()))
        self.answer_id, self.is_metered, self.headers = name, False, dict[str, str]()
        self.n_prompt, self.n_generated = sum(len(wish.prompt) for wish in visit.wishes), 0

    def places(self) -> dict[str, Address]:
        """Where its flights are now."""
        return {flight.request_id: flight.decode for flight in self.flights if flight.decode is not None}

    async def submit(self) -> None:
        await self._serve(self._gateway.submit)

    async def take_over(self, held: Held) -> None:
        for flight in self.flights:
            flight.attempt = held[flight.request_id][1]
        await self._serve(lambda flight: self._gateway.take_over(flight, held[flight.request_id][0]))

    async def _serve(self, start: Callable[[Flight], None]) -> None:
        outcome: Outcome = "broken"
        limit_s = (self.deadline_ns - now_ns()) / 1e9 if self.deadline_ns else float("inf")
        if self.life.meter is not None and not await self._may_start(self.life.meter):
            return
        try:
            for flight in self.flights:
                start(flight)
            with trio.move_on_after(max(0.0, limit_s)) as limit, trio.move_on_after(self.visit.patience_s) as patience:
                outcome = await self._take()
            if limit.cancelled_caught:
                outcome, self.error = "failed", DeadlineExceeded("not finished in time")
            elif patience.cancelled_caught:
                outcome = "left"
        finally:
            self.ended_s = trio.current_time()
            self.placed = self.places()
            if not self.life.dead:
                self._close_all(gone=outcome == "left" or isinstance(self.error, StreamLost))
                self.ledger.close(Span.CANCELLED if outcome in ("left", "failed") else Span.OUT_DETOKENIZE, now_ns())
                self.world.watch.ledger(self.name, self.ledger, self.flights)
            self.outcome = "broken" if self.life.dead else outcome
            self.done.set()

    async def _may_start(self, meter: Meter) -> bool:
        """Whether its key's limits have room. Else it has ended."""
        outcome: Outcome = "broken"
        n_most = sum(wish.stopping.max_tokens for wish in self.visit.wishes)
        may = False
        try:
            await meter.start(self, self.n_prompt, self.n_prompt + n_most)
            may = not self.life.dead
            self.world.watch.keys.granted(self)
        except RequestError as error:
            outcome, self.error = "failed", error
        finally:
            if not may:
                self.ended_s = trio.current_time()
                self.outcome = outcome
                self.done.set()
        return may

    def _close_all(self, *, gone: bool) -> None:
        """What goes on without its client is charged for when it has ended."""
        going_on = [flight for flight in self.flights if gone and self._gateway.goes_on(flight)]
        self.n_generated = sum(len(flight.ids) for flight in self.flights)
        ended = sum(len(flight.ids) for flight in self.flights if flight not in going_on)
        on_spent: Callable[[int, bool], None] = lambda n, resumed: None  # noqa: E731
        if self.life.meter is not None and going_on:
            on_spent = self.life.meter.end_later(self, self.n_prompt + ended, len(going_on))
        elif self.life.meter is not None:
            self.life.meter.end(self, self.n_prompt + self.n_generated)
        for flight in self.flights:
            self._close(flight, gone, on_spent)

    async def _take(self) -> Outcome:
        left, ledger = list(range(len(self.flights))), self.ledger
        while True:
            for i in list(left):
                flight, stop_at = self.flights[i], self.visit.wishes[i].stop_at
                if flight.finish is not None or (stop_at and len(flight.ids) >= stop_at):
                    left.remove(i)
                    self._close(flight, False, lambda n, resumed: None)
                elif flight.error is not None:
                    self.error = flight.error
                    return "failed"
            ledger.close(Span.OUT_DETOKENIZE, now_ns())
            ledger.first_byte()
            if self.visit.reads_s:
                await trio.sleep(self.visit.reads_s)
                await self.life.runs()
                ledger.close(Span.OUT_WRITE_BLOCKED, now_ns())
            if not left:
                return "answered"
            await self.bell.wait()
            await self.life.runs()
            ledger.close(Span.OUT_HANDOFF, now_ns())

    def _close(self, flight: Flight, gone: bool, on_spent: Callable[[int, bool], None]) -> None:
        """If it had not ended, somebody must hear of it."""
        gateway, watch = self._gateway, self.world.watch
        flew = gateway._flights.get(flight.request_id) is flight and not flight.ended
        to, before = flight.decode or gateway._router, watch.n_endings_sent
        if gone:
            gateway.leave(flight, "the client left", on_spent)
        else:
            gateway.close(flight, "it is answered")
        if flew and to is not None and watch.n_endings_sent == before and not self.life.dead:
            raise Violation("cancel lost", f"{flight.request_id} is closed and {to} is not told")

    def _flight(self, i: int, wish: Wish) -> Flight:
        return Flight(
            request_id=self.name if len(self.visit.wishes) == 1 else f"{self.name}/{i}",
            prompt=wish.prompt,
            sampling=wish.sampling,
            stopping=wish.stopping,
            ledger=self.ledger,
            bell=self.bell,
            salt=self.visit.salt,
            priority=self.visit.priority,
            deadline_ns=self.deadline_ns,
            prompt_logprobs=wish.prompt_logprobs,
            resumable=Resumable(self.name, b"") if self.visit.resumes else None,
        )
