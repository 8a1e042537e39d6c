"""Rows made ahead are those that would be made behind, or they are not found."""

import numpy as np
import pytest

from relay.engine.ahead import RowsAhead, next_draw
from relay.engine.sequence import Sequence
from relay.messages import Sampling, Stopping


def sequence(number: int, n_tokens: int, *, min_tokens: int = 0) -> Sequence:
    """With a prompt of one token, and so many generated that there are `n_tokens`."""
    return Sequence(
        id=number,
        side="decode",
        request_id=str(number),
        attempt=1,
        tokens=list(range(3, 3 + n_tokens)),
        n_prompt=1,
        sampling=Sampling(temperature=0.7, seed=number),
        stopping=Stopping(max_tokens=90, min_tokens=min_tokens, stop_ids=(1,)),
        blocks=[number * 10 + i for i in range(-(-n_tokens // 16))],
        n_computed=n_tokens - 1,
    )


def gain(*sequences: Sequence) -> None:
    """What a step does to each."""
    for each in sequences:
        each.n_computed += 1
        each.tokens.append(100 + each.id)


def test_a_batch_made_ahead_has_the_next_tokens_of_those_that_are_asked_for() -> None:
    some = [sequence(1, 5), sequence(2, 20), sequence(3, 6)]
    ahead = RowsAhead(some)
    gain(*some)
    batch = ahead.batch([some[1], some[0]])
    assert batch is not None
    assert batch.tokens.tolist() == [102, 101]
    assert batch.positions.tolist() == [20, 5]
    assert batch.sequence.tolist() == batch.logit_rows.tolist() == [0, 1]
    assert batch.block_table.tolist() == [[20, 21], [10, -1]]
    assert batch.block_table.dtype == np.int32
    last = ahead.batch([some[2]])
    assert last is not None
    assert last.block_table.tolist() == [[30]]


@pytest.mark.parametrize("min_tokens", [0, 5, 6, 7])
def test_a_draw_made_ahead_is_the_one_that_would_be_made_behind(min_tokens: int) -> None:
    one = sequence(1, 6, min_tokens=min_tokens)  # with 5 generated
    ahead = RowsAhead([one])
    gain(one)
    assert ahead.draws[0] == next_draw(one)
    assert ahead.draws[0].tokens is one.tokens
    assert ahead.draws[0].suppress == ((1,) if min_tokens > 6 else ())


def test_what_has_changed_otherwise_is_not_found() -> None:
    one, two = sequence(1, 5), sequence(2, 16)
    ahead = RowsAhead([one, two])
    assert ahead.find(one) is None  # the step is not over
    gain(one, two)
    assert ahead.find(one) == 0
    assert ahead.find(sequence(3, 5)) is None
    two.blocks += [22]  # it grew
    assert ahead.find(two) is None
    assert ahead.batch([one, two]) is None
    before = one.blocks
    one.blocks = list(before)  # it was preempted, and found as many
    assert ahead.find(one) is None
    one.blocks = before
    gain(one)
    assert ahead.find(one) is None
    one.tokens.pop()
    assert ahead.find(one) is None  # as many tokens, one of which is computed too far
