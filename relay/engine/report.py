"""What one step of an engine tells its actors."""

from dataclasses import dataclass, field

from relay.engine.sequence import Sequence
from relay.messages import FinishReason, Logprobs, Trail

NO_NUMBER = "the model's numbers for its next token are not finite: a token of it, or a weight, leads to infinity or NaN"


@dataclass(slots=True)
class Advance:
    """A sequence got a token. `finish` set, or side prefill: it has left the engine, and its blocks are its actor's again.

    `trail` is what its ledger has to hear of the time before this step.
    """

    sequence: Sequence
    index: int
    token: int
    finish: FinishReason | None
    logprobs: Logprobs | None
    trail: Trail


@dataclass(slots=True)
class StepReport:
    """One step, or a turn without compute that only handled jobs.

    gone: dropped on request; the engine does not touch their blocks any more. refused: joins whose checksums differ, with the layer.
    failed: their logits are not numbers, whoever computes them; they have left the engine.
    trail: the step's own time, for every row. n_prefill_tokens, n_decode_rows: what it computed, of each decoding sequence its last token;
    n_drafted: guesses beside those, of which n_accepted came. Advances of one sequence are neighbours.
    """

    advances: list[Advance] = field(default_factory=list)
    gone: list[Sequence] = field(default_factory=list)
    refused: list[tuple[Sequence, str]] = field(default_factory=list)
    failed: list[Sequence] = field(default_factory=list)
    n_preempted: int = 0
    trail: Trail = ()
    n_prefill_tokens: int = 0
    n_decode_rows: int = 0
    n_drafted: int = 0
    n_accepted: int = 0
    began_ns: int = 0
    ended_ns: int = 0
    push_ns: int = 0
