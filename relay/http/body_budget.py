"""How many bytes of request bodies a gateway holds at most: counted before they are kept, given back once nobody needs them.

A body counts from its first byte until it has been understood, or its request has ended. What belongs to a connection and not to a body is
bounded by itself: 32 KiB of headers and two parts of 64 KiB that nobody has taken yet, `gateway.max_connections` times.
"""

from relay.auth.caller import Caller
from relay.errors import Overloaded, RateLimited

_RETRY_AFTER_S = 1.0


class BodyBudget:
    """`held` bytes now, `refused` requests so far."""

    def __init__(self, limit: int, key_share: float) -> None:
        """`key_share` of the limit is what one key may have."""
        self.limit, self._most_of_key = limit, limit * key_share
        self.held = self.refused = 0
        self._by_key: dict[str, int] = {}

    def take(self, caller: Caller, n_bytes: int) -> None:
        """Raises Overloaded, RateLimited where it is the key that holds too much; then nothing was taken."""
        if self.held + n_bytes > self.limit:
            self.refused += 1
            raise Overloaded("request bodies take all the memory that they may; try again later", retry_after_s=_RETRY_AFTER_S)
        if caller.name is not None:
            of_key = self._by_key.get(caller.name, 0) + n_bytes
            if of_key > self._most_of_key:
                self.refused += 1
                text = f"request bodies of the API key `{caller.name}` take all the memory that is for one key; try again later"
                raise RateLimited(text, retry_after_s=_RETRY_AFTER_S)
            self._by_key[caller.name] = of_key
        self.held += n_bytes

    def give_back(self, caller: Caller, n_bytes: int) -> None:
        self.held -= n_bytes
        if caller.name is not None and n_bytes:
            self._by_key[caller.name] -= n_bytes
            if not self._by_key[caller.name]:
                del self._by_key[caller.name]
