"""What a gateway needs to go on with a stream that another began: made once for a request, kept by the decode worker of its first choice.

It holds the request as it was understood: what a body has beside that, and nobody reads, is not kept. It never leaves the server.
"""

import msgspec

from relay.errors import InvalidRequest, RequestTooLarge
from relay.http.exchange import Exchange
from relay.messages import Resumable
from relay.openai.chat import ChatRequest
from relay.openai.completion import CompletionRequest
from relay.runtime.frames import MAX_FRAME
from relay.runtime.row_parts import logprobs_bytes


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """`request` is JSON of the endpoint's request struct; `owner` and `secret` as `relay.messages.Resumable` has them."""

    route: str
    request: bytes
    request_id: str
    public_id: str
    owner: str
    secret: str
    created: int
    seed: int
    deadline_ns: int

    def resumable(self, max_bytes: int) -> Resumable:
        """Sealed, to go with the first choice. Raises RequestTooLarge."""
        sealed = msgspec.msgpack.encode(self)
        if len(sealed) > max_bytes:
            raise RequestTooLarge(
                f"a resumable stream's request is remembered with it, and this one takes {len(sealed)} bytes of {max_bytes} that are "
                "allowed (gateway.max_resumable_kib); send less, or leave out X-Relay-Resume"
            )
        return Resumable(self.public_id, sealed, self.owner, self.secret, self.created)


_OPENER = msgspec.msgpack.Decoder(Envelope)


def envelope_of(exchange: Exchange, request: ChatRequest | CompletionRequest, seed: int, secret: str) -> Envelope:
    """Of a request that is about to start."""
    return Envelope(
        route=exchange.route,
        request=msgspec.json.encode(request),
        request_id=exchange.request_id,
        public_id=exchange.public_id,
        owner=exchange.caller.name or "",
        secret=secret,
        created=exchange.created,
        seed=seed,
        deadline_ns=exchange.deadline_ns,
    )


def opened(sealed: bytes) -> Envelope:
    return _OPENER.decode(sealed)


def unsealed(resumable: Resumable) -> Resumable:
    """For the other choices of the request."""
    return msgspec.structs.replace(resumable, envelope=b"")


def refuse_long_scores(max_tokens: int, n_top: int) -> None:
    """The log probabilities of a resumable stream go with each new attempt, which one message must hold. Raises InvalidRequest."""
    n_bytes = logprobs_bytes(max_tokens, n_top) if n_top >= 0 else 0
    if n_bytes > MAX_FRAME // 2:
        fit = MAX_FRAME // 2 // logprobs_bytes(1, n_top)
        raise InvalidRequest(
            f"a resumable stream with {n_top} alternatives of log probabilities may have {fit} tokens, and this one {max_tokens}; ask for "
            "fewer with `max_tokens`, for fewer log probabilities, or leave out X-Relay-Resume",
            param="max_tokens",
        )
