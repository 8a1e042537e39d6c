"""Guesses in decode steps: what they may bring, what they may cost, and that nothing else shows of them."""

import pytest

from relay.engine.drafter import NgramDrafter
from relay.engine.engine import Add
from relay.engine.runner import Batch, StepResult
from relay.engine.sequence import Sequence
from relay.messages import Sampling
from relay.policy.batching import StepClock
from tests.engine.guesses import Guesses
from tests.engine.test_engine import GREEDY, BesideRunner, Worker, expected, prompt_of


def knowing(worker: Worker, n_prompt: int, n: int, *, right: float = 1.0, seed: int = 0, sampling: Sampling = GREEDY) -> Sequence:
    """A sequence whose guesses are right with this chance each, and as many as may be."""
    prompt = prompt_of(n_prompt, seed)
    sequence = worker.sequence(prompt, n, sampling=sampling)
    sequence.drafter = guesses = Guesses(prompt + expected(prompt, n, sampling), seed, right)
    guesses._draw.randint = lambda a, b: b  # type: ignore[method-assign]
    return sequence


def steps_until_done(worker: Worker, *sequences: Sequence) -> list[int]:
    """Rows of each step."""
    rows: list[int] = []
    step = worker.runner.step

    def look(batch: Batch) -> StepResult:
        rows.append(len(batch.tokens))
        return step(batch)

    worker.runner.step = look  # type: ignore[method-assign]
    worker.step(*(Add(sequence) for sequence in sequences))
    while len(worker.finished) < len(sequences):
        worker.step()
    return rows


@pytest.mark.parametrize("flies", [False, True])
def test_right_guesses_come_all_at_once(flies: bool) -> None:
    worker = Worker(runner=BesideRunner, flies=flies, draft_rows=4)
    sequence = knowing(worker, 5, 10)
    assert steps_until_done(worker, sequence) == [5, 4, 4, 1]  # one token with the prompt, four, four, and the last
    assert worker.got[sequence.id] == expected(prompt_of(5), 10)
    assert isinstance(sequence.drafter, Guesses)
    assert sequence.drafter.judged == [(3, 3), (3, 3)]
    assert worker.n_accepted == 6
    assert worker.all_back()


def test_wrong_guesses_leave_one_token_a_step() -> None:
    worker = Worker(draft_rows=4)
    sequence = knowing(worker, 5, 10, right=0.0)
    assert steps_until_done(worker, sequence) == [5, 4, 4, 4, 4, 4, 4, 3, 2, 1]
    assert worker.got[sequence.id] == expected(prompt_of(5), 10)
    assert worker.n_accepted == 0


def test_rows_that_are_left_are_shared_and_none_are_left_beside_many_or_prompts() -> None:
    worker = Worker(draft_rows=4)
    two = [knowing(worker, 5, 9, seed=n) for n in range(2)]
    assert steps_until_done(worker, *two)[1:3] == [4, 4]
    worker = Worker(draft_rows=4)
    three = [knowing(worker, 5, 9, seed=n) for n in range(3)]
    assert steps_until_done(worker, *three)[1:3] == [4, 4]
    assert len([each for each in three if each.drafter.judged]) > 1  # type: ignore[union-attr]
    worker = Worker(draft_rows=4)
    four = [knowing(worker, 5, 9, seed=n) for n in range(4)]
    assert steps_until_done(worker, *four)[1:] == [4] * 8
    worker = Worker(draft_rows=4, budget_tiles=1, max_chunk=8)
    one, late = knowing(worker, 5, 30), worker.sequence(prompt_of(24, 9), 1)
    worker.step(Add(one))
    assert [worker.step(*jobs).n_drafted for jobs in ((Add(late),), (), (), ())] == [0, 0, 0, 3]


def test_a_suspect_and_who_is_penalized_are_not_guessed_for() -> None:
    for sampling in (Sampling(temperature=0.0, presence_penalty=0.5), Sampling(temperature=0.0, repetition_penalty=1.1)):
        worker = Worker(draft_rows=4)
        sequence = knowing(worker, 5, 6, sampling=sampling)
        assert steps_until_done(worker, sequence) == [5, 1, 1, 1, 1, 1]
    worker = Worker(draft_rows=4)
    sequence = knowing(worker, 5, 6)
    worker.step(Add(sequence))
    sequence.lone = True
    assert worker.step().n_drafted == 0


def test_random_numbers_belong_to_positions() -> None:
    sampling = Sampling(temperature=1.0, seed=5)
    worker = Worker(draft_rows=8)
    sequence = knowing(worker, 5, 20, sampling=sampling)
    assert len(steps_until_done(worker, sequence)) < 6
    assert worker.got[sequence.id] == expected(prompt_of(5), 20, sampling)


def test_a_stop_id_ends_it_in_the_middle_of_what_was_guessed() -> None:
    worker = Worker(draft_rows=8)
    answer = expected(prompt_of(5), 20)
    sequence = knowing(worker, 5, 20)
    sequence.stopping = type(sequence.stopping)(max_tokens=20, stop_ids=(answer[3],))
    steps_until_done(worker, sequence)
    assert worker.got[sequence.id] == answer[:4]
    assert worker.finished[sequence.id] == "stop"
    assert worker.all_back()


def test_guesses_take_no_memory_that_others_need() -> None:
    worker = Worker(n_blocks=1, draft_rows=8)
    sequence = knowing(worker, 10, 6)
    assert steps_until_done(worker, sequence) == [10, 5]
    assert worker.got[sequence.id] == expected(prompt_of(10), 6)
    worker = Worker(n_blocks=2, draft_rows=8)
    one, two = knowing(worker, 13, 3), knowing(worker, 13, 3, seed=1)
    assert max(steps_until_done(worker, one, two)[1:]) <= 6
    assert worker.n_preempted == 0


def test_who_has_no_number_behind_a_guess_is_computed_alone_before_it_is_given_up() -> None:
    worker = Worker(draft_rows=4)
    sequence = knowing(worker, 5, 10)
    worker.step(Add(sequence))
    step = worker.runner.step

    def none_with_guesses(batch: Batch) -> StepResult:
        result = step(batch)
        if len(batch.tokens) > 1:
            result.ids[:] = [-1] * len(result.ids)
        return result

    worker.runner.step = none_with_guesses  # type: ignore[method-assign]
    while not worker.finished:
        assert worker.step().failed == []
    assert worker.got[sequence.id] == expected(prompt_of(5), 10)

    def none(batch: Batch) -> StepResult:
        result = step(batch)
        result.ids[:] = [-1] * len(result.ids)
        return result

    worker = Worker(draft_rows=4)
    step, other = worker.runner.step, knowing(worker, 5, 10, seed=1)
    worker.step(Add(other))
    worker.runner.step = none  # type: ignore[method-assign]
    assert worker.step().failed == []
    assert worker.step().failed == [other]


def test_what_followed_the_last_two_tokens_is_guessed_again() -> None:
    drafter = NgramDrafter()
    assert drafter.draft([7], 3, 0.0) == []
    assert drafter.draft([7, 1, 2, 3, 4], 3, 0.0) == []
    tokens = [7, 1, 2, 3, 4, 5, 1, 2]
    assert drafter.draft(tokens, 3, 0.0) == [3, 4, 5]
    assert drafter.draft([*tokens, 9, 1, 2], 1, 0.0) == [9]  # where they were seen last


def test_a_period_is_guessed_beyond_its_end() -> None:
    assert NgramDrafter().draft([4, 9, 9, 9], 7, 0.0) == [9] * 7
    assert NgramDrafter().draft([4, 9, 9, 9, 5, 6, 5, 6], 5, 0.0) == [5, 6, 5, 6, 5]


def test_a_guess_is_made_where_it_is_likelier_than_dear() -> None:
    """What is guessed right is guessed longer; what is not, after a while not at all, and then tried again."""
    tokens = [5, 6, 5, 6]
    drafter = NgramDrafter()
    assert [len(drafter.draft(tokens, 7, cost)) for cost in (0.7, 0.5, 0.3, 0.1)] == [0, 1, 2, 4]
    for _ in range(8):
        drafter.judge(1, 1)
    assert len(drafter.draft(tokens, 7, 0.3)) == 7
    lengths = []
    for _ in range(60):
        drafted = len(drafter.draft(tokens, 7, 0.3))
        lengths.append(drafted)
        if drafted:
            drafter.judge(drafted, 0)
    assert sorted(lengths[:7], reverse=True) == lengths[:7]
    assert lengths[7:].count(0) > 40
    assert 1 in lengths[12:]


def test_who_guesses_is_told_what_a_row_adds_to_the_step() -> None:
    worker = Worker(draft_rows=4)
    worker.engine._clock = clock = StepClock(1, 100.0, 1.0, 3.0, 0.01)  # 3 ms, 1 a row, 0.01 for each token that a row looks back at
    clock.ran = lambda n_rows, n_kv_tokens, ms: None  # type: ignore[method-assign]
    two = [knowing(worker, 10, 3, seed=n) for n in range(2)]
    worker.step(*(Add(sequence) for sequence in two))
    worker.step()
    assert isinstance(two[0].drafter, Guesses)
    assert two[0].drafter.costs == pytest.approx([2 * 1.11 / 5.22])  # for both of them, where two are gained


def test_the_floor_of_a_step_leaves_wrong_guesses_out_and_reads_kv_once() -> None:
    worker = Worker(draft_rows=4)
    floors: list[tuple[int, int]] = []
    worker.engine._floor_ns = lambda n_rows, n_kv_tokens: floors.append((n_rows, n_kv_tokens)) or 0  # type: ignore[func-returns-value]
    sequence = knowing(worker, 5, 10)
    worker.step(Add(sequence))
    worker.step()
    assert isinstance(sequence.drafter, Guesses)
    sequence.drafter._right = 0.0
    worker.step()
    assert floors == [(5, 15), (4, 9), (1, 13)]


def test_of_a_long_prompt_only_the_end_is_looked_at() -> None:
    tokens = [*range(100_000), 99_000, 99_001]
    drafter = NgramDrafter()
    assert drafter.draft(tokens, 2, 0.0) == [99_002, 99_003]
    assert len(drafter._after) < 10_000
    assert drafter.draft([*tokens, 5, 50, 51], 2, 0.0) == []  # too long ago


def test_who_had_its_prompt_scored_is_guessed_for_like_others() -> None:
    worker = Worker(draft_rows=4)
    sequence = knowing(worker, 5, 10)
    sequence.prompt_logprobs = 0
    assert steps_until_done(worker, sequence) == [5, 4, 4, 1]
    assert len(sequence.scores) == 4
    assert worker.got[sequence.id] == expected(prompt_of(5), 10)
