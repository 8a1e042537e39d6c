"""Requests that killed what computed them, remembered for a while: so that the same one, sent again, kills nobody. Pure.

What is the same: of a request that killed before it had a token, the prompt, whatever else it asks for; of one that killed later, the
prompt, how tokens are drawn, and how much is scored. The seed and the choice are left out, which a client that tries again rarely names,
and so is the length, which says when it ends and not what it does. So another answer to the same prompt may be refused that would have
killed nobody: for some minutes, which is less than a worker's life is worth.
"""

import array
import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from relay.messages import Sampling

_MOST: Final = 1024
_encode = msgspec.msgpack.Encoder().encode


def digests(prompt: Sequence[int], sampling: Sampling, prompt_logprobs: int) -> tuple[bytes, bytes]:
    """Of the prompt alone, and of all that matters: 16 bytes each; half a millisecond for a hundred thousand tokens."""
    same = msgspec.structs.replace(sampling, seed=0, choice=0)
    whole = hashlib.blake2b(array.array("q", prompt).tobytes(), digest_size=16)
    of_prompt = whole.digest()
    whole.update(_encode((same, prompt_logprobs)))
    return of_prompt, whole.digest()


class PoisonMemory:
    """The last so many, each until its time is over. Times are those of `relay.clock.now_ns`."""

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._until_ns: OrderedDict[bytes, int] = OrderedDict()

    def add(self, digest: bytes, until_ns: int) -> bool:
        """Whether that is news."""
        if self._until_ns.get(digest, 0) >= until_ns:
            return False
        self._until_ns[digest] = until_ns
        self._until_ns.move_to_end(digest)
        if len(self._until_ns) > self._most:
            self._until_ns.popitem(last=False)
        return True

    def holds(self, digest: bytes, now_ns: int) -> bool:
        return self._until_ns.get(digest, 0) > now_ns

    def is_empty(self, now_ns: int) -> bool:
        """Whether nothing need be looked up."""
        for known, until_ns in list(self._until_ns.items()):
            if until_ns > now_ns:
                return False
            del self._until_ns[known]
        return True

    def __iter__(self) -> Iterator[tuple[bytes, int]]:
        return iter(list(self._until_ns.items()))
