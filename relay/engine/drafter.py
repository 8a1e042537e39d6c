"""Speculative decoding without a second model: what may come next is guessed from what the sequence itself has said before.

In: a sequence's tokens. Out: a few that may follow. A decode step computes them behind the last token, in rows of their own, draws after
each, and keeps what was drawn as long as it was guessed (`relay.engine.engine`). The law of exactness makes that free of consequences: a
row's logits depend on the tokens before it alone and its random number on its position, so that every token is the one that would have
been drawn without guesses. What a guess can cost is time, so that who guesses wrong guesses less.
"""

from typing import Protocol

_MOST_MISSES = 3


class Drafter(Protocol):
    """Of one sequence."""

    def draft(self, tokens: list[int], most: int) -> list[int]:
        """At most `most` tokens that may follow these; `tokens` only ever grows."""
        ...

    def judge(self, n_drafted: int, n_accepted: int) -> None:
        """Of the last draft, the first `n_accepted` came."""
        ...


class NgramDrafter:
    """What followed the last two tokens when they were last seen together, and on from there.

    All guessed right: the next guess is twice as long, up to `most`. None: one token, and only after one, three, then seven steps.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._after: dict[tuple[int, int], int] = {}  # two tokens: the place of what followed them last
        self._n_seen = 2
        self._length, self._misses, self._pause = 1, 0, 0

    def draft(self, tokens: list[int], most: int) -> list[int]:
        """See `Drafter`."""
        after, n = self._after, len(tokens)
        for i in range(self._n_seen, n):
            after[tokens[i - 2], tokens[i - 1]] = i
        self._n_seen = max(self._n_seen, n)
        if self._pause:
            self._pause -= 1
            return []
        at = after.get((tokens[-2], tokens[-1])) if n >= 2 else None
        if at is None:
            return []
        period = n - at
        return [tokens[at + i % period] for i in range(min(most, self._length))]

    def judge(self, n_drafted: int, n_accepted: int) -> None:
        """See `Drafter`."""
        if n_accepted == 0:
            self._misses = min(self._misses + 1, _MOST_MISSES)
            self._length, self._pause = 1, (1 << self._misses) - 1
        else:
            self._misses = 0
            self._length = min(2 * self._length + 1, self._most) if n_accepted == n_drafted else n_accepted
