"""Speculative decoding without a second model: what may come next is guessed from what the sequence itself has said before.

In: a sequence's tokens. Out: a few that may follow. A decode step computes them behind the last token, in rows of their own, draws after
each, and keeps what was drawn as long as it was guessed (`relay.engine.engine`). The law of exactness makes that free of consequences: a
row's logits depend on the tokens before it alone and its random number on its position, so that every token is the one that would have
been drawn without guesses. What a guess can cost is time: it is made where it is likelier to come than its row is dear.
"""

from typing import Protocol

_FAR = 8192  # tokens at a sequence's end that are looked at when it is first guessed for
_FIRST_CHANCE, _LEARNS, _RETURNS = 0.6, 0.15, 0.01


class Drafter(Protocol):
    """Of one sequence."""

    def draft(self, tokens: list[int], most: int, cost: float) -> list[int]:
        """At most `most` tokens that may follow these; `tokens` only ever grows. cost: the chance from which on one is worth its row."""
        ...

    def judge(self, n_drafted: int, n_accepted: int) -> None:
        """Of the last draft, the first `n_accepted` came."""
        ...


class NgramDrafter:
    """What followed the last two tokens when they were last seen together, and on from there.

    The chance of a guess is what became of those before it; the chance that all of several come, a power of it. While it is too low for
    one, it rises a little with each step, so that there is another try.
    """

    def __init__(self) -> None:
        self._after: dict[tuple[int, int], int] = {}  # two tokens: the place of what followed them last
        self._n_seen = 0
        self._chance = _FIRST_CHANCE

    def draft(self, tokens: list[int], most: int, cost: float) -> list[int]:
        """See `Drafter`."""
        n_worth, chance = 0, self._chance
        while n_worth < most and chance > cost:
            n_worth += 1
            chance *= self._chance
        if n_worth == 0:
            self._chance += _RETURNS * (1 - self._chance)
            return []
        after, n = self._after, len(tokens)
        for i in range(max(self._n_seen or n - _FAR, 2), n):
            after[tokens[i - 2], tokens[i - 1]] = i
        self._n_seen = n
        at = after.get((tokens[-2], tokens[-1])) if n >= 2 else None
        if at is None:
            return []
        period = n - at
        return [tokens[at + i % period] for i in range(n_worth)]

    def judge(self, n_drafted: int, n_accepted: int) -> None:
        """See `Drafter`."""
        for _ in range(n_accepted):
            self._chance += _LEARNS * (1 - self._chance)
        if n_accepted < n_drafted:
            self._chance -= _LEARNS * self._chance
