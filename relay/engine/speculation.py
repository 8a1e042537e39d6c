"""Which rows of a decode step go to guesses, and what becomes of them.

A decode step of few rows mostly waits for the weights, so that rows which are left there go to guesses (`relay.engine.drafter`): tokens
that may follow are computed behind a sequence's last one, and those that are drawn as guessed are all gained at once. KV of a wrong guess
lies behind the sequence's end, where nobody looks before it is written again.
"""

from collections.abc import Callable

from relay.engine.drafter import Drafter
from relay.engine.sequence import Sequence
from relay.engine.step import Part
from relay.kv.book import BlockBook
from relay.policy.batching import StepClock


class Speculation:
    """Fills decode steps up to `rows` rows, for each sequence with at most `most` guesses of its own drafter, which `drafter` makes."""

    def __init__(self, drafter: Callable[[Sequence], Drafter], rows: int, most: int, book: BlockBook, block_tokens: int) -> None:
        self.rows = rows
        self._drafter, self._most = drafter, most
        self._book, self._block_tokens = book, block_tokens
        self._n_offers = 0

    def offer(self, parts: list[Part], clock: StepClock, n_running: int) -> list[Part]:
        """Decode rows alone; where rows are left, with guesses. Who is offered a row more than others changes from step to step.

        n_running: so many blocks stay free for the next tokens of all.
        """
        room = self.rows - len(parts)
        if room <= 0:
            return parts
        drafted, n = list(parts), len(parts)
        n_kv_tokens = sum(len(part.sequence.tokens) for part in parts)
        alone = clock.predict_ms(n, n_kv_tokens)
        self._n_offers += 1
        for i in range(n):
            place = (self._n_offers + i) % n
            sequence = parts[place].sequence
            more = clock.predict_ms(n + 1, n_kv_tokens + len(sequence.tokens)) - alone
            # it costs all of them that time, and gains one a token where the step gains n
            drafts = self._drafts(sequence, -(-room // (n - i)), n * more / alone if alone else 0.0, n_running)
            room -= len(drafts)
            if drafts:
                drafted[place] = Part(sequence, 1 + len(drafts), True, drafts)
        return drafted

    def _drafts(self, sequence: Sequence, most: int, cost: float, n_running: int) -> tuple[int, ...]:
        """Guesses for which there is memory. Who is penalized for his last tokens cannot be drawn for before they are known."""
        most = min(most, sequence.stopping.max_tokens - sequence.n_generated - 1)
        if most <= 0 or sequence.undraftable or sequence.sampling.penalizes:
            return ()
        if sequence.drafter is None:
            sequence.drafter = self._drafter(sequence)
        drafts = sequence.drafter.draft(sequence.tokens, min(most, self._most), cost)
        room = len(sequence.blocks) * self._block_tokens - len(sequence.tokens)
        if len(drafts) > room and self._book.n_free() > n_running:
            sequence.blocks += self._book.allocate(1) or []
            room = len(sequence.blocks) * self._block_tokens - len(sequence.tokens)
        return tuple(drafts[:room])


def judge(part: Part) -> None:
    """`part` has gained what it gained: its drafter hears what of its guesses came."""
    sequence = part.sequence
    n_gained = len(sequence.tokens) - 1 - sequence.n_computed
    assert sequence.drafter is not None
    sequence.drafter.judge(len(part.drafts), max(n_gained - 1, 0))
