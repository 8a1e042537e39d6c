"""Limiter: the one place that counts what API keys use, so that a limit holds over all gateways together.

Lives in the router's worker. Receives Reserve and Settle from each gateway's quota, and the news of deaths; sends Granted and Denied. What
a dead gateway had reserved comes back. In a later life it first takes in the Claims in which every gateway says what it was granted, and
until then (or a second) answers nobody: a restart forgets nothing. Ends with its worker.
"""

from typing import assert_never

import structlog
import trio

from relay.auth.limits import Accounts
from relay.clock import now_ns
from relay.messages import Address, Claim, Down, LimiterInbox, Reserve, Settle, Up
from relay.runtime.node import Context

_CLAIMS_WITHIN_S = 1.0
log = structlog.get_logger()


class LimiterActor:
    _context: Context

    def __init__(self, quotas: tuple[str, ...]) -> None:
        """`quotas`: the actors that may hold something of an earlier life."""
        self._accounts = Accounts()
        self._awaited = dict.fromkeys(quotas)
        self._held: list[Reserve] = []

    async def run(self, context: Context) -> None:
        """Serve until the worker ends."""
        self._context = context
        if context.address.epoch == 1:
            self._awaited.clear()  # nobody was granted anything yet
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._give_up_waiting)
            async for message in context.inbox:
                self._on(message)  # type: ignore[arg-type]
            nursery.cancel_scope.cancel()

    def _on(self, message: LimiterInbox) -> None:
        match message:
            case Up():
                pass  # quotas speak first
            case Claim():
                self._on_claim(message)
            case Reserve():
                self._on_reserve(message)
            case Settle():
                self._accounts.settle(message.quota, message.request_id, message.n_tokens)
            case Down():
                self._on_down(message.address)
            case _:
                assert_never(message)

    def _on_claim(self, message: Claim) -> None:
        self._context.monitor(message.quota)
        self._accounts.restore(now_ns(), message)
        self._awaited.pop(message.quota.actor, None)
        self._answer_held()

    def _on_reserve(self, message: Reserve) -> None:
        self._context.monitor(message.quota)
        self._held.append(message)
        self._answer_held()

    def _on_down(self, address: Address) -> None:
        self._held = [message for message in self._held if message.quota != address]
        released = self._accounts.release(address)
        if released:
            log.info("reservations came back", of=str(address), requests=released)

    def _answer_held(self) -> None:
        """In the order they came, once nothing is missing that may count against them."""
        if self._awaited:
            return
        held, self._held = self._held, []
        for message in held:
            self._context.post(message.quota, self._accounts.reserve(now_ns(), message))

    async def _give_up_waiting(self) -> None:
        await self._context.sleep(_CLAIMS_WITHIN_S)
        if self._awaited:
            log.warning("counting without these gateways' claims", gateways=list(self._awaited))
            self._awaited.clear()
            self._answer_held()
