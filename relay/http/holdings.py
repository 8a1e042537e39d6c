"""What a gateway holds for the requests that it serves, in bytes: counted before it is held, per request, per key and altogether.

A request's weight is estimated from what it asks for: its prompts, a copy of them for each choice on the way to the router, and above all
the log probabilities of every token that may come, with their alternatives, first as numbers and, for a whole answer, as text too.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from relay.actors.gateway import Flight
from relay.errors import Overloaded, RateLimited, RequestTooLarge
from relay.policy.weight import fresh_bytes

_CHOICE_BYTES, _ID_BYTES, _COPY_BYTES, _BIAS_BYTES = 4096, 40, 13, 16
_COUNTED_TOKENS = 1024  # of an answer: more of them are bounded by the KV pools, where each takes a hundred times as much
_SCORE_BYTES, _TOP_BYTES = 160, 72  # of one token's log probabilities, and of each alternative
_SHOWN_BYTES = 180  # of a token that is kept as text until the answer is whole


def request_bytes(flights: Sequence[Flight], *, whole: bool) -> int:
    """Of all choices together; `whole`: the answer is kept until its end. At most, but for text, of which a body bounds the prompt's."""
    total, prompts = 0, {id(flight.prompt): len(flight.prompt) for flight in flights}
    for flight in flights:
        sampling, n_prompt, n_most = flight.sampling, len(flight.prompt), flight.stopping.max_tokens
        total += _CHOICE_BYTES + _COPY_BYTES * n_prompt + _BIAS_BYTES * len(sampling.logit_bias) + _ID_BYTES * min(n_most, _COUNTED_TOKENS)
        total += n_most * _token_bytes(sampling.logprobs, whole=whole) + n_prompt * _token_bytes(flight.prompt_logprobs, whole=whole)
    return total + _ID_BYTES * sum(prompts.values())


def queued_bytes(flights: Sequence[Flight]) -> int:
    """Of all choices together, while they wait at the router."""
    return sum(fresh_bytes(len(flight.prompt), flight.sampling, flight.stopping) for flight in flights)


def _token_bytes(n_top: int, *, whole: bool) -> int:
    if n_top < 0:
        return 0
    return _SCORE_BYTES + _TOP_BYTES * n_top + (_SHOWN_BYTES * (1 + n_top) if whole else 0)


class Holdings:
    """Of one gateway. `max_request`, `max_key` (of one API key), `max_all` in bytes; `max_queue` as the router has it."""

    def __init__(self, *, max_request: int, max_key: int, max_all: int, max_queue: int) -> None:
        self._max_request, self._max_key, self._max_all, self._max_queue = max_request, max_key, max_all, max_queue
        self._by_key: Counter[str | None] = Counter()
        self.n_bytes = 0

    @contextmanager
    def hold(self, key: str | None, flights: Sequence[Flight], *, whole: bool) -> Iterator[None]:
        """Count them while the block lasts. Raises RequestTooLarge, RateLimited, Overloaded."""
        n_bytes, n_queued = request_bytes(flights, whole=whole), queued_bytes(flights)
        if n_queued > self._max_queue:
            raise RequestTooLarge(
                f"while its {len(flights)} choices wait for a place they take {n_queued >> 20} MiB of {self._max_queue >> 20} MiB that are "
                "allowed (router.max_queue_mib); ask for fewer choices or prompts"
            )
        if n_bytes > self._max_request:
            raise RequestTooLarge(
                f"to serve this request would take {n_bytes >> 20} MiB of {self._max_request >> 20} MiB that are allowed "
                "(gateway.max_request_mib); ask for fewer log probabilities, fewer choices or prompts, or a smaller `max_tokens`"
            )
        if key is not None and self._by_key[key] + n_bytes > self._max_key:
            raise RateLimited(f"the API key `{key}` has too much under way at once; try again when some of it has ended", retry_after_s=1.0)
        if self.n_bytes + n_bytes > self._max_all:
            raise Overloaded("too much is under way at once; try again later", retry_after_s=1.0)
        self.n_bytes += n_bytes
        self._by_key[key] += n_bytes
        try:
            yield
        finally:
            self.n_bytes -= n_bytes
            self._by_key[key] -= n_bytes
            if not self._by_key[key]:
                del self._by_key[key]
