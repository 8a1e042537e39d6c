"""A key's limits, as HTTP has them: leave to start, the x-ratelimit headers that clients read, and 429 with the time to come again.

Headers as OpenAI sends them: limits, what remains, and how long until all of it is back, as a duration such as 1m0s or 120ms. Of limits
that the key does not have there are none.
"""

from collections.abc import Callable
from typing import Protocol

from relay.actors.quota import QuotaActor
from relay.auth.caller import Caller
from relay.auth.metrics import KeyMetrics
from relay.errors import InvalidRequest, RateLimited
from relay.messages import Denied, Limits, Standing


class Metered(Protocol):
    """What is counted: an exchange."""

    caller: Caller
    answer_id: str
    headers: dict[str, str]
    is_metered: bool
    n_prompt: int
    n_generated: int


class Meter:
    """`quota` None where no keys are configured: nothing is limited then, and nothing waits."""

    def __init__(self, quota: QuotaActor | None, metrics: KeyMetrics) -> None:
        self._quota, self._metrics = quota, metrics
        self._holders: dict[str, Metered] = {}  # by the answer's id: whose end settles it

    async def start(self, exchange: Metered, n_prompt: int, n_tokens: int) -> None:
        """Return when the request may start; then `end` must follow. `n_tokens`: of its prompts, and the most that it may generate.

        An exchange that goes on with an answer goes on with what was granted for it, and ends it in place of the one before.

        Raises RateLimited; InvalidRequest for what no waiting would make fit.
        """
        caller = exchange.caller
        limits = caller.limits
        if self._quota is None or caller.name is None or limits == Limits():
            return
        if limits.tokens and n_tokens > limits.tokens:
            raise InvalidRequest(
                f"the request may take {n_tokens} tokens, {n_prompt} of them its prompt, and the API key `{caller.name}` has "
                f"{limits.tokens} a minute; ask for fewer with `max_tokens`, or shorten the prompt",
                param="max_tokens",
            )
        answer = await self._quota.reserve(exchange.answer_id, caller.name, limits, n_prompt, n_tokens)
        exchange.headers.update(rate_headers(limits, answer.standing))
        if isinstance(answer, Denied):
            self._metrics.limited(caller.name, answer.limit)
            raise RateLimited(_refusal(caller.name, limits, answer, n_tokens), retry_after_s=answer.retry_after_ms / 1000)
        before = self._holders.get(exchange.answer_id)
        if before is not None:
            before.is_metered = False
        self._holders[exchange.answer_id] = exchange
        exchange.is_metered = True

    def end(self, exchange: Metered, n_tokens: int) -> None:
        """It used so many tokens."""
        if exchange.is_metered and self._quota is not None:
            exchange.is_metered = False
            del self._holders[exchange.answer_id]
            self._quota.settle(exchange.answer_id, n_tokens)

    def end_later(self, exchange: Metered, n_tokens: int, n_left: int) -> Callable[[int, bool], None]:
        """Its client has left `n_left` choices that go on; the others used `n_tokens` so far. To be called with the tokens of each of them
        when it has ended, and whether it goes on at another gateway, which charges for it then."""
        name, n_seen = exchange.caller.name, exchange.n_generated
        total, n_open, elsewhere = n_tokens, n_left, False

        def ended(n_generated: int, resumed: bool) -> None:
            nonlocal total, n_open, elsewhere
            total, n_open, elsewhere = total + n_generated, n_open - 1, elsewhere or resumed
            if n_open == 0:
                if name is not None and not elsewhere:
                    self._metrics.unread(name, max(0, total - exchange.n_prompt - n_seen))
                self.end(exchange, total)

        return ended


def most_tokens(limits: Limits, n_prompt: int, n_choices: int) -> int | None:
    """What each choice may generate where the client names no number: a key's minute is the limit of one request too. None: no limit."""
    return max(1, (limits.tokens - n_prompt) // n_choices) if limits.tokens else None


def rate_headers(limits: Limits, standing: Standing) -> dict[str, str]:
    """x-ratelimit-{limit,remaining,reset}-{requests,tokens}."""
    found: dict[str, str] = {}
    for what, limit, left, reset_ms in (
        ("requests", limits.requests, standing.requests_left, standing.requests_reset_ms),
        ("tokens", limits.tokens, standing.tokens_left, standing.tokens_reset_ms),
    ):
        if limit:
            found[f"x-ratelimit-limit-{what}"] = str(limit)
            found[f"x-ratelimit-remaining-{what}"] = str(left)
            found[f"x-ratelimit-reset-{what}"] = duration(reset_ms)
    return found


def duration(ms: int) -> str:
    """120ms, 7.66s, 6m0s, 1h0m0s."""
    if 0 < ms < 1000:
        return f"{ms}ms"
    minutes, rest_ms = divmod(ms, 60_000)
    hours, minutes = divmod(minutes, 60)
    seconds = f"{rest_ms / 1000:g}s"
    return f"{hours}h{minutes}m{seconds}" if hours else f"{minutes}m{seconds}" if minutes else seconds


def _refusal(name: str, limits: Limits, denied: Denied, n_tokens: int) -> str:
    again = f"try again in {duration(denied.retry_after_ms)}"
    match denied.limit:
        case "requests":
            return f"the API key `{name}` has used its {limits.requests} requests a minute; {again}"
        case "tokens":
            left = f"{denied.standing.tokens_left} of its {limits.tokens} tokens a minute left"
            return f"the API key `{name}` has {left}, and the request may take {n_tokens}; {again}"
        case "concurrency":
            return f"the API key `{name}` has {limits.concurrency} requests running, which is its limit; try again when one has ended"
