"""One turn of an engine between its two halves: whose rows are computed, which of them draw, and what came of it."""

from dataclasses import dataclass, field

from relay.engine.report import StepReport
from relay.engine.runner import Abandonable, Batch
from relay.engine.sequence import Sequence, SequenceId
from relay.messages import FinishReason


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of one sequence in a batch: `n_rows` with those of `drafts`, tokens that it may get, at their end."""

    sequence: Sequence
    n_rows: int
    draws: bool  # whether a token is drawn behind its last own row, and so behind each draft
    drafts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Scored:
    """A logit row: whether it draws (else it scores a prompt token), and what must have been drawn before it, -1 for nothing."""

    sequence: Sequence
    draws: bool
    guess: int = -1


@dataclass(slots=True)
class Step:
    """One turn between its two halves. `batch` is what is to be computed, None if nothing is; `scored` its logit rows.

    gains: of each of these (index, finish) of the token that its sequence got, None behind a wrong guess; None before the result is looked
    at. followed_ns: when the next step was begun in its place, which goes on with the same sequences.
    """

    report: StepReport
    parts: list[Part]
    batch: Batch | None = None
    scored: list[Scored] = field(default_factory=list)
    gains: list[tuple[int, FinishReason | None] | None] | None = None
    started_ns: int = 0
    computed_ns: int = 0
    followed_ns: int = 0


class UnderWay:
    """A step of prompts alone, and for whom it is still computed. Both threads may `forgo`."""

    def __init__(self, ids: list[SequenceId], pending: Abandonable) -> None:
        self._wanted, self._pending = dict.fromkeys(ids), pending

    def forgo(self, sequence_id: SequenceId) -> None:
        """That one will be dropped. For the last of them the rest of the step is abandoned."""
        self._wanted.pop(sequence_id, None)
        if not self._wanted:
            self._pending.abandon()


def needed(step: Step, n_rows: int, n_kv_tokens: int) -> tuple[int, int]:
    """Of a step's rows and of what they look back at, what its tokens would have taken at least: no wrong guess, KV read once."""
    for part in step.parts:
        if part.drafts:
            first = part.sequence.n_computed + 1
            n_kv_tokens -= sum(range(first, first + len(part.drafts)))
    return n_rows - step.report.n_drafted + step.report.n_accepted, n_kv_tokens
