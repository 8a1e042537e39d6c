"""Guesses for the simulated engines: of the modelled runner's next tokens, some of them wrong."""

import copy
import random

from relay.engine.keyed_random import uniform
from relay.engine.modelled_runner import Oracle
from relay.engine.sequence import Sequence

_RIGHT = 0.7


class OracleDrafter:
    """`Drafter` of one sequence. As many guesses as `draw` says."""

    def __init__(self, sequence: Sequence, draw: random.Random, vocab_size: int, n_layers: int) -> None:
        self._sampling, self._draw = sequence.sampling, draw
        self._oracle, self._n_pushed = Oracle(vocab_size, n_layers), 0

    def draft(self, tokens: list[int], most: int, cost: float) -> list[int]:
        """See `Drafter`."""
        for token in tokens[self._n_pushed :]:
            self._oracle.push(token)
        self._n_pushed = len(tokens)
        oracle, sampling, guesses = copy.copy(self._oracle), self._sampling, list[int]()
        for n in range(self._draw.randint(0, most)):
            position = len(tokens) + n
            token = oracle.next_token(uniform(sampling.seed, sampling.choice, position) if sampling.temperature > 0 else 0.0)
            guesses.append(token if self._draw.random() < _RIGHT else token ^ 1)
            oracle.push(guesses[-1])
        return guesses

    def judge(self, n_drafted: int, n_accepted: int) -> None:
        """See `Drafter`."""
