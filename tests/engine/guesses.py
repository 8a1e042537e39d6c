"""A drafter that knows what comes, and errs now and then."""

import random
from collections.abc import Sequence


class Guesses:
    """`whole`: all tokens of a sequence, as they will have been at its end."""

    def __init__(self, whole: Sequence[int], seed: int | str, right: float = 0.7) -> None:
        self._whole, self._draw, self._right = whole, random.Random(f"guesses {seed}"), right
        self.judged: list[tuple[int, int]] = []
        self.costs: list[float] = []

    def draft(self, tokens: list[int], most: int, cost: float) -> list[int]:
        self.costs.append(cost)
        n = self._draw.randint(0, most)
        return [token if self._draw.random() < self._right else token ^ 1 for token in self._whole[len(tokens) : len(tokens) + n]]

    def judge(self, n_drafted: int, n_accepted: int) -> None:
        self.judged.append((n_drafted, n_accepted))
