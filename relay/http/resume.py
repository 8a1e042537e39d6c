"""`GET /v1/requests/{id}/stream`: go on with a resumable stream, on any gateway, behind the event that `Last-Event-ID` names."""

from collections.abc import Mapping

import msgspec

from relay.errors import StreamLost
from relay.http.exchange import Exchange
from relay.http.generate import ChatEndpoint, CompletionEndpoint, Envelope, Held
from relay.http.positions import read_position
from relay.http.routes import Ask
from relay.messages import Address

_ANSWER_WITHIN_S = 1.0
_ENVELOPE = msgspec.msgpack.Decoder(Envelope)


class Found(msgspec.Struct, frozen=True, array_like=True):
    """A decode worker's answer: one choice that it remembers."""

    decode: Address
    request_id: str
    attempt: int
    envelope: bytes


_FOUND = msgspec.msgpack.Decoder(list[Found])


class ResumeRoute:
    """`endpoints` by the route that their streams began with."""

    def __init__(self, ask: Ask, endpoints: Mapping[str, ChatEndpoint | CompletionEndpoint]) -> None:
        self._ask, self._endpoints = ask, endpoints

    async def answer(self, exchange: Exchange) -> None:
        """Raises RequestError."""
        name = exchange.scope["path_params"]["id"]
        seen = read_position(exchange.header(b"last-event-id").decode("latin-1"))
        answers = await self._ask("resumable", name.encode(), _ANSWER_WITHIN_S)
        every = [found for body in answers.answers.values() for found in _FOUND.decode(body)]
        envelopes = {found.envelope: _ENVELOPE.decode(found.envelope) for found in every}
        own = [envelope for envelope in envelopes.values() if envelope.owner == exchange.caller.name]
        if not own:
            text = "it was not opened with X-Relay-Resume, its time ran out, or the decode worker that remembered it has ended since"
            raise StreamLost(f"there is no stream `{name}` to resume: {text}")
        envelope = max(own, key=lambda each: (each.created, each.request_id))  # a client may have used its ID twice
        held: dict[str, Held] = {}
        for found in sorted(every, key=lambda each: each.attempt):
            if envelopes[found.envelope].request_id == envelope.request_id:
                held[found.request_id] = Held(found.decode, found.attempt)
        await self._endpoints[envelope.route].resume(exchange, envelope, held, seen)
