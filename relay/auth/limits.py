"""Exact accounts of what keys use: requests and tokens of the last minute, and requests that run. No clock: the time comes with each call.

A sliding window: in no 60 seconds, wherever they begin, are more than `requests` requests admitted, nor requests that together take more
than `tokens` tokens. (A token bucket would let through twice that around a pause; fixed minutes, around their border.) A request counts at
its admission: with its prompt and the most it may generate, and from its end on with what it used. What is refused counts nothing. Whoever
reserves for a request that counts already, or has within the minute, goes on with it: a stream that is resumed is charged once.
"""

from collections import deque
from dataclasses import dataclass
from typing import Literal

from relay.messages import Address, Claim, Denied, Granted, Limits, Reserve, Standing, Use

MINUTE_NS = 60_000_000_000
_CONCURRENCY_RETRY_MS = 1000  # nobody knows when another request will end

Limit = Literal["requests", "tokens", "concurrency"]


@dataclass(slots=True, eq=False)
class _Use:
    """One admitted request. `n_tokens` is what it counts for now."""

    request_id: str
    key: str
    holder: Address
    at_ns: int
    n_prompt: int
    n_tokens: int
    is_open: bool = True
    in_window: bool = True
    least: int = 0  # what it used before it was opened again


class _Account:
    """Of one key. `uses` is in the order of admission."""

    def __init__(self) -> None:
        self.uses: deque[_Use] = deque()
        self.tokens = self.running = 0

    def age(self, now_ns: int) -> list[_Use]:
        """Forget what was admitted a minute ago."""
        gone = []
        while self.uses and now_ns - self.uses[0].at_ns >= MINUTE_NS:
            old = self.uses.popleft()
            old.in_window = False
            self.tokens -= old.n_tokens
            gone.append(old)
        return gone

    def add(self, use: _Use) -> None:
        self.uses.append(use)
        self.tokens += use.n_tokens
        self.running += use.is_open

    def end(self, use: _Use, n_tokens: int) -> None:
        use.is_open = False
        self.running -= 1
        n_tokens = max(n_tokens, use.least)
        if use.in_window:
            self.tokens += n_tokens - use.n_tokens
        use.n_tokens = n_tokens

    def reopen(self, use: _Use) -> None:
        """It runs once more. What it used stays counted until its end says what it came to."""
        use.is_open, use.least = True, use.n_tokens
        self.running += 1

    def wait_ms(self, now_ns: int, limits: Limits, n_tokens: int) -> tuple[Limit, int] | None:
        """Which limit has no room, and for how long; the one that takes longest. None if there is room."""
        waits: list[tuple[int, Limit]] = []
        if limits.concurrency and self.running >= limits.concurrency:
            waits.append((_CONCURRENCY_RETRY_MS, "concurrency"))
        if limits.requests and len(self.uses) >= limits.requests:
            waits.append((_left_ms(self.uses[len(self.uses) - limits.requests], now_ns), "requests"))
        if limits.tokens and self.tokens + n_tokens > limits.tokens:
            waits.append((self._tokens_wait_ms(now_ns, self.tokens + n_tokens - limits.tokens), "tokens"))
        if not waits:
            return None
        wait, limit = max(waits)
        return limit, wait

    def standing(self, now_ns: int, limits: Limits) -> Standing:
        all_back_ms = _left_ms(self.uses[-1], now_ns) if self.uses else 0
        return Standing(
            requests_left=max(0, limits.requests - len(self.uses)),
            requests_reset_ms=all_back_ms,
            tokens_left=max(0, limits.tokens - self.tokens),
            tokens_reset_ms=all_back_ms if self.tokens else 0,
        )

    def _tokens_wait_ms(self, now_ns: int, too_many: int) -> int:
        for use in self.uses:
            too_many -= use.n_tokens
            if too_many <= 0:
                return _left_ms(use, now_ns)
        return MINUTE_NS // 1_000_000


class Accounts:
    """Of all keys. A holder is who reserves for others and may die: an address."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}
        self._uses: dict[str, _Use] = {}  # by request: what is open or counts in the window

    def reserve(self, now_ns: int, message: Reserve) -> Granted | Denied:
        """Count it, if its key's limits have room. What is reserved already is granted again and counted once."""
        account = self._aged(message.key, now_ns)
        use = self._uses.get(message.request_id)
        if use is not None and use.key == message.key:
            use.holder = message.quota
            if not use.is_open:
                account.reopen(use)
        else:
            refused = account.wait_ms(now_ns, message.limits, message.n_tokens)
            if refused is not None:
                limit, wait_ms = refused
                standing = account.standing(now_ns, message.limits)
                return Denied(request_id=message.request_id, limit=limit, retry_after_ms=max(1, wait_ms), standing=standing)
            self.add(now_ns, message)
        return Granted(request_id=message.request_id, standing=account.standing(now_ns, message.limits))

    def add(self, now_ns: int, message: Reserve) -> None:
        """Count it whatever the limits are: somebody else has granted it."""
        account, known = self._aged(message.key, now_ns), self._uses.get(message.request_id)
        if known is not None and known.key == message.key:
            if not known.is_open:
                account.reopen(known)
            return
        use = _Use(message.request_id, message.key, message.quota, now_ns, message.n_prompt, message.n_tokens)
        account.add(use)
        self._uses[use.request_id] = use

    def settle(self, holder: Address, request_id: str, n_tokens: int) -> None:
        """It has ended. Of one not known: of no effect."""
        use = self._uses.get(request_id)
        if use is not None and use.is_open and use.holder == holder:
            self._end(use, n_tokens)

    def release(self, holder: Address) -> int:
        """The holder is dead. How much its requests had generated died with it: they count their prompts. How many they were."""
        orphans = [use for use in self._uses.values() if use.is_open and use.holder == holder]
        for use in orphans:
            self._end(use, use.n_prompt)
        return len(orphans)

    def uses(self, now_ns: int) -> list[Use]:
        """Everything that still counts, as a new limiter is to be told."""
        for key in self._accounts:
            self._aged(key, now_ns)
        counted = {id(use): use for account in self._accounts.values() for use in account.uses}
        counted |= {id(use): use for use in self._uses.values()}
        return [
            Use(use.request_id if use.is_open else "", use.key, now_ns - use.at_ns, use.n_prompt, use.n_tokens, use.is_open)
            for use in counted.values()
        ]

    def restore(self, now_ns: int, claim: Claim) -> None:
        """Count what a predecessor granted, in its place among what is here already."""
        for key, uses in _by_key(claim, now_ns).items():
            account = self._aged(key, now_ns)
            for use in uses:
                if use.is_open:
                    known = self._uses.get(use.request_id)
                    if known is not None:  # two gateways have had it: it is of who reserved for it last
                        known.holder = use.holder if use.at_ns > known.at_ns else known.holder
                        continue
                    self._uses[use.request_id] = use
                use.in_window = now_ns - use.at_ns < MINUTE_NS
                if use.in_window:
                    account.add(use)
                else:
                    account.running += 1
            account.uses = deque(sorted(account.uses, key=lambda use: use.at_ns))

    def _aged(self, key: str, now_ns: int) -> _Account:
        account = self._accounts.get(key)
        if account is None:
            account = self._accounts[key] = _Account()
        for old in account.age(now_ns):
            if not old.is_open:
                self._uses.pop(old.request_id, None)
        return account

    def _end(self, use: _Use, n_tokens: int) -> None:
        self._accounts[use.key].end(use, n_tokens)
        if not use.in_window:
            del self._uses[use.request_id]


def _by_key(claim: Claim, now_ns: int) -> dict[str, list[_Use]]:
    found: dict[str, list[_Use]] = {}
    for use in claim.uses:
        if use.is_open or use.age_ns < MINUTE_NS:
            known = _Use(use.request_id, use.key, claim.quota, now_ns - use.age_ns, use.n_prompt, use.n_tokens, use.is_open)
            found.setdefault(use.key, []).append(known)
    return found


def _left_ms(use: _Use, now_ns: int) -> int:
    """Until it counts no longer, rounded up."""
    return -(-(MINUTE_NS - (now_ns - use.at_ns)) // 1_000_000)
