"""Quota: a gateway's side of the limits. HTTP tasks ask it for leave to start, and tell it what a request used in the end.

Owns the reservations of this gateway and a copy of what it was granted in the last minute. Sends Reserve and Settle to the limiter;
receives Granted and Denied. To a new limiter it first sends a Claim with everything that still counts, then again what was not answered.
Ends with its worker, whose death gives back what it held.
"""

from dataclasses import dataclass, field
from typing import assert_never

import structlog
import trio

from relay.auth.limits import Accounts
from relay.clock import now_ns
from relay.errors import LaneFull, Overloaded
from relay.messages import Address, Claim, Denied, Down, Granted, Limits, QuotaInbox, Reserve, Settle, Up
from relay.runtime.node import Context

_ANSWER_WITHIN_S = 10.0  # over a restart of the limiter's worker
_MOST_CLAIMED = 100_000  # uses; a frame has to hold them
log = structlog.get_logger()


@dataclass(slots=True, eq=False)
class _Waiting:
    reserve: Reserve
    answered: trio.Event = field(default_factory=trio.Event)
    answer: Granted | Denied | None = None


class QuotaActor:
    _context: Context

    def __init__(self) -> None:
        self._accounts = Accounts()
        self._waiting: dict[str, list[_Waiting]] = {}  # several where readers come for one stream at once
        self._limiter: Address | None = None

    async def run(self, context: Context) -> None:
        """Serve until the worker ends."""
        self._context = context
        async for message in context.inbox:
            self._on(message)  # type: ignore[arg-type]

    async def reserve(self, request_id: str, key: str, limits: Limits, n_prompt: int, n_tokens: int) -> Granted | Denied:
        """One hop to the limiter and back. What is granted must be settled; cancelled, it holds nothing.

        Raises Overloaded when nobody answers.
        """
        message = Reserve(request_id=request_id, key=key, limits=limits, n_prompt=n_prompt, n_tokens=n_tokens, quota=self._context.address)
        waiting = _Waiting(message)
        self._waiting.setdefault(request_id, []).append(waiting)
        taken = False
        try:
            self._post(message)
            with trio.move_on_after(_ANSWER_WITHIN_S):
                await waiting.answered.wait()
            if waiting.answer is None:
                raise Overloaded("what this key has used cannot be counted at the moment; try again", retry_after_s=1.0)
            taken = True
            return waiting.answer
        finally:
            self._waiting[request_id].remove(waiting)
            if not self._waiting[request_id]:
                del self._waiting[request_id]
            if not taken:
                self.settle(request_id, 0)

    def settle(self, request_id: str, n_tokens: int) -> None:
        """It has ended and used this many tokens. Idempotent."""
        self._accounts.settle(self._context.address, request_id, n_tokens)
        if self._limiter is not None:
            self._context.post(self._limiter, Settle(request_id=request_id, quota=self._context.address, n_tokens=n_tokens))

    def _post(self, message: Reserve) -> None:
        """Without a limiter it waits for one to come up."""
        if self._limiter is None:
            return
        try:
            self._context.offer(self._limiter, message)
        except LaneFull:
            raise Overloaded("too many requests are being counted; try again", retry_after_s=1.0) from None

    def _on(self, message: QuotaInbox) -> None:
        match message:
            case Up():
                self._on_up(message.address)
            case Granted() | Denied():
                self._on_answer(message)
            case Down():
                if message.address == self._limiter:
                    self._limiter = None
            case _:
                assert_never(message)

    def _on_up(self, address: Address) -> None:
        if not address.actor.startswith("limiter/"):
            return
        self._limiter = address
        self._context.monitor(address)
        uses = self._accounts.uses(now_ns())
        if len(uses) > _MOST_CLAIMED:
            log.warning("too many uses for one claim; the oldest are not told", uses=len(uses), told=_MOST_CLAIMED)
            uses = sorted(uses, key=lambda use: use.age_ns)[:_MOST_CLAIMED]
        self._context.post(address, Claim(quota=self._context.address, uses=tuple(uses)))
        for some in self._waiting.values():
            self._context.post(address, some[0].reserve)

    def _on_answer(self, message: Granted | Denied) -> None:
        some = self._waiting.get(message.request_id)
        if some is None:
            if isinstance(message, Granted):  # whoever asked has left, and may have settled it before it was even sent
                self.settle(message.request_id, 0)
            return
        if isinstance(message, Granted):
            self._accounts.add(now_ns(), some[0].reserve)
        for waiting in some:
            waiting.answer = message
            waiting.answered.set()
