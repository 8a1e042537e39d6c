"""Who reads which resumable stream, as the messages that its decode actor has handled tell: what a drain must wait for."""

from typing import TYPE_CHECKING

import trio

from relay.messages import Address, Detach, Displaced, Down, Expect, Key, Left, Message, Placed, Resume, Up
from relay.simulation.violation import Violation

if TYPE_CHECKING:
    from relay.simulation.life import Life


class Readers:
    """Told of every message that a decode actor sends or has handled."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._resumable: dict[str, None] = {}
        self._reader: dict[tuple[Address, Key], Address] = {}
        self._unread_s: dict[tuple[Address, Key], float] = {}  # since when
        self._turned_away: dict[tuple[Address, Key], Address] = {}  # this gateway, whose Resume has not been handled to its end
        self._gateways: dict[tuple[Address, Address], None] = {}  # this decode actor knows that gateway

    def sent(self, source: Address, to: Address, message: Message) -> None:
        match message:
            case Expect() if message.admit.resumable is not None:
                self._resumable[message.admit.request_id] = None
            case Placed() if message.request_id in self._resumable:
                self._reader[source, (message.request_id, message.attempt)] = to
            case Left():
                self._reader.pop((source, (message.request_id, message.attempt)), None)  # to its end, or to be told so
            case Displaced():
                self._turned_away[source, (message.request_id, message.attempt)] = to

    def handled(self, address: Address, message: Message) -> None:
        match message:
            case Up() if message.address.actor.startswith("gateway/"):
                self._gateways[address, message.address] = None
            case Resume():
                attempt = message.request_id, message.attempt
                self._unread_s.pop((address, attempt), None)
                if self._turned_away.pop((address, attempt), None) != message.gateway:
                    self._reader[address, attempt] = message.gateway
            case Detach():
                self._lost(address, (message.request_id, message.attempt), message.gateway)
            case Down():
                self._gateways.pop((address, message.address), None)
                for decode, key in list(self._reader):
                    if decode == address:
                        self._lost(address, key, message.address)

    def drained(self, life: "Life", address: Address) -> None:
        """Its drain is over before its patience. Raises Violation if somebody might have come yet."""
        if not any(decode == address and life.node.is_alive(gateway) for decode, gateway in self._gateways):
            return
        for (decode, key), since_s in self._unread_s.items():
            if decode == address and trio.current_time() - since_s < self._grace_s:
                raise Violation("drained away", f"{address} has drained, and nobody has come for {key} yet")

    def _lost(self, address: Address, key: Key, gateway: Address) -> None:
        if self._reader.get((address, key)) == gateway:
            del self._reader[address, key]
            self._unread_s[address, key] = trio.current_time()
