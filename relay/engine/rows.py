"""What one batch consists of: flat arrays of the rows of some sequences, and what each logit row is for.

In: parts, and the decode rows that were made ahead. Out: a Batch for the runner, and a Scored for each of its logit rows. A sequence that
runs computes its last token, and guesses behind it; one that waits goes on where its KV ends.
"""

from collections.abc import Container

import numpy as np

from relay.engine.ahead import RowsAhead, next_draw
from relay.engine.runner import Batch, Draw, Push
from relay.engine.sequence import Sequence, SequenceId
from relay.engine.step import Part, Scored
from relay.kv.layout import KVLayout


def rows_of(parts: list[Part], running: Container[SequenceId], ahead: RowsAhead | None, layout: KVLayout) -> tuple[Batch, list[Scored]]:
    """`running`: whose KV is complete but for the last token. A part's sequence counts as pushed up to where this batch pushes it."""
    if ahead is not None and all(part.n_rows == 1 and part.draws for part in parts):
        batch = ahead.batch([part.sequence for part in parts])
        if batch is not None:
            return batch, [Scored(part.sequence, True) for part in parts]
    width = max(len(part.sequence.blocks) for part in parts)
    tokens: list[int] = []
    positions: list[int] = []
    owner: list[int] = []
    table: list[int] = []
    logit_rows: list[int] = []
    draws: list[Draw] = []
    of_row: list[Scored] = []
    pushes: list[Push] = []
    for i, part in enumerate(parts):
        sequence, n_rows = part.sequence, part.n_rows
        known = ahead.find(sequence) if ahead is not None else None
        first = len(sequence.tokens) - 1 if sequence.id in running else sequence.n_computed
        if sequence.prompt_logprobs >= 0:
            for row in range(n_rows - part.draws - len(part.drafts)):
                logit_rows.append(len(tokens) + row)
                draws.append(_score(sequence, first + row + 1))
                of_row.append(Scored(sequence, False))
        tokens += sequence.tokens[first : first + n_rows - len(part.drafts)]
        positions += range(first, first + n_rows)
        owner += [i] * n_rows
        table += sequence.blocks
        table += [-1] * (width - len(sequence.blocks))
        if part.draws:
            logit_rows.append(len(tokens) - 1)
            draws.append(next_draw(sequence) if ahead is None or known is None else ahead.draws[known])
            of_row.append(Scored(sequence, True))
        for n, guess in enumerate(part.drafts, 1):
            logit_rows.append(len(tokens))
            tokens.append(guess)
            draws.append(next_draw(sequence, n))
            of_row.append(Scored(sequence, True, guess))
        if sequence.target is not None:
            pushes.append(_push(sequence, first + n_rows, layout))
    batch = Batch(
        np.array(tokens, dtype=np.int32),
        np.array(positions, dtype=np.int32),
        np.array(owner, dtype=np.int32),
        np.array(table, dtype=np.int32).reshape(len(parts), width),
        np.array(logit_rows, dtype=np.int32),
        tuple(draws),
        tuple(pushes),
    )
    return batch, of_row


def _score(sequence: Sequence, position: int) -> Draw:
    return Draw(sequence.sampling, 0.0, sequence.tokens, sequence.n_prompt, target=sequence.tokens[position], top=sequence.prompt_logprobs)


def _push(sequence: Sequence, n_computed: int, layout: KVLayout) -> Push:
    """The target's blocks that this step completes; the last one too, once the prompt ends."""
    target = sequence.target
    assert target is not None
    skip = target.n_present // layout.block_tokens
    done = n_computed == len(sequence.tokens)
    until = (layout.blocks_for(n_computed) if done else n_computed // layout.block_tokens) - skip
    first = sequence.n_pushed
    sequence.n_pushed = max(first, until)
    return Push(
        target.memory,
        np.asarray(sequence.blocks[skip + first : skip + max(first, until)], dtype=np.int32),
        np.asarray(target.blocks[first : max(first, until)], dtype=np.int32),
    )
