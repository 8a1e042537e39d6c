"""Where the time of a step goes in the ledgers of those who took part: spans that end at the moments given."""

from relay.engine.sequence import Sequence
from relay.engine.step import Step
from relay.ledger.spans import Span
from relay.messages import Trail


def waited(sequence: Sequence, began: int) -> None:
    """The time up to its first chunk was spent behind others or for want of blocks; between chunks, interleaved with others."""
    if sequence.preempted:
        sequence.trail.append((Span.DECODE_PREEMPTED, began))
    elif sequence.started:
        sequence.trail.append((Span.PREFILL_INTERLEAVE, began))
    else:
        sequence.trail.append((Span.PREFILL_QUEUE_BLOCKS if sequence.lacked_blocks else Span.PREFILL_QUEUE_BEHIND_PREFILL, began))
    sequence.started = True


def of_prefill(step: Step, floor: int, push_ns: int, ended: int) -> Trail:
    """floor: when the step would have ended at the soonest. push_ns: what pushes added to it."""
    pushing = step.computed_ns - push_ns
    return (
        (Span.PREFILL_HOST, step.started_ns),
        (Span.PREFILL_FLOOR, min(floor, pushing)),
        (Span.PREFILL_EXCESS, pushing),
        (Span.KV_PUSH, step.computed_ns),
        (Span.PREFILL_HOST, ended),
    )


def of_decode(step: Step, floor: int, alone: int, ended: int) -> Trail:
    """alone: when it would have ended without rows of prompts."""
    return (
        (Span.DECODE_HOST, step.started_ns),
        (Span.DECODE_FLOOR, min(floor, alone)),
        (Span.DECODE_EXCESS, alone),
        (Span.DECODE_INTERFERENCE, step.computed_ns),
        (Span.DECODE_HOST, ended),
    )
