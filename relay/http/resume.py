"""`GET /v1/requests/{id}/stream`: go on with a resumable stream, on any gateway, behind the event that `Last-Event-ID` names.

The id is the server's own (header `X-Relay-Resume` of the stream's answer), which nobody can guess; or the client's `X-Request-ID`, which
counts for the API key that opened the stream, and without keys only together with the secret that the client chose when it did.
"""

from collections.abc import Mapping

import msgspec

from relay.errors import StreamLost
from relay.http.envelope import opened
from relay.http.exchange import Exchange
from relay.http.generate import ChatEndpoint, CompletionEndpoint, Held
from relay.http.positions import read_position
from relay.http.routes import Ask
from relay.messages import Address

_ANSWER_WITHIN_S = 1.0


class Wanted(msgspec.Struct, frozen=True, array_like=True):
    """A gateway to all: the newest request that this asker may read by this name."""

    name: str
    owner: str
    secret: str


class Found(msgspec.Struct, frozen=True, array_like=True):
    """A decode worker's answer: one choice that it remembers. One of a request's choices has its envelope."""

    decode: Address
    request_id: str
    attempt: int
    envelope: bytes


_FOUND = msgspec.msgpack.Decoder(list[Found])
_REASONS = (
    "it was not opened with X-Relay-Resume, its time ran out, there was no room to remember it, or the decode worker that did has ended "
    "since; by an ID of your own it is found with the key that opened it, or, where the server has no keys, with the secret that "
    "X-Relay-Resume had then"
)


class ResumeRoute:
    """`endpoints` by the route that their streams began with."""

    def __init__(self, ask: Ask, endpoints: Mapping[str, ChatEndpoint | CompletionEndpoint]) -> None:
        self._ask, self._endpoints = ask, endpoints

    async def answer(self, exchange: Exchange) -> None:
        """Raises RequestError."""
        name = exchange.scope["path_params"]["id"]
        seen = read_position(exchange.header(b"last-event-id").decode("latin-1"))
        wanted = Wanted(name, exchange.caller.name or "", exchange.resume_secret() or "")
        answers = await self._ask("resumable", msgspec.msgpack.encode(wanted), _ANSWER_WITHIN_S)
        every = [found for body in answers.answers.values() for found in _FOUND.decode(body)]
        envelopes = [opened(found.envelope) for found in every if found.envelope]
        if not envelopes:
            raise StreamLost(f"there is no stream `{name}` to resume: {_REASONS}")
        envelope = max(envelopes, key=lambda each: (each.created, each.request_id))  # a client may have used its ID twice
        held: dict[str, Held] = {}
        for found in sorted(every, key=lambda each: each.attempt):
            if found.request_id.split("/")[0] == envelope.request_id:
                held[found.request_id] = Held(found.decode, found.attempt)
        await self._endpoints[envelope.route].resume(exchange, envelope, held, seen)
