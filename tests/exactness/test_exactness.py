"""The law of exactness on the real model: the same bits whatever shares the batch, however a prompt is cut, wherever it is computed.

Prompts around the edges of blocks and chunks, greedy, seeded, penalized and biased, each computed alone in one chunk first; then in other
chunk sizes, all in one batch, disaggregated by pushes into another pool, preempted, found in the cache, on other numbers of threads, and in
random schedules of all that. Token ids and log probabilities are equal and logits bit-identical: no difference is accepted.
`scripts/exactness` runs more random schedules.
"""

import random

import pytest

from relay.engine.engine import Add
from tests.exactness.conftest import Make
from tests.exactness.harness import LENGTHS, Case, Outcome, Worker, alone, cases, hand_over, random_schedule

CASES = cases()
FEW = [i for i, n in enumerate(LENGTHS) if n in (1, 17, 33, 65)]  # for the reference, which takes its time


@pytest.fixture(scope="module")
def right(native: Make) -> list[Outcome]:
    return alone(native, CASES)


def some(numbers: list[int]) -> dict[int, Case]:
    return {i: CASES[i] for i in numbers}


@pytest.mark.parametrize("chunk", [5, 16, 23, 48])
def test_chunk_sizes_leave_no_trace(native: Make, right: list[Outcome], chunk: int) -> None:
    """One chunk of one prompt a step, while those that came before decode."""
    worker = Worker(native(), max_chunk=chunk)
    worker.run([Add(worker.sequence(number, case)) for number, case in enumerate(CASES)])
    assert [worker.outcomes[number] for number in range(len(CASES))] == right


def test_batch_mates_leave_no_trace(native: Make, right: list[Outcome]) -> None:
    """All at once, in another order, in mixed steps of chunks and decode rows."""
    worker = Worker(native(), budget_rows=64)
    order = list(range(len(CASES)))
    random.Random(3).shuffle(order)
    worker.run([Add(worker.sequence(number, CASES[number])) for number in order])
    assert [worker.outcomes[number] for number in range(len(CASES))] == right


@pytest.mark.parametrize("budget_rows", [32, 512])
def test_disaggregation_leaves_no_trace(native: Make, right: list[Outcome], budget_rows: int) -> None:
    """Prefilled in one pool, pushed into blocks of another, and decoded there in one batch."""
    prefill, decode = Worker(native(), budget_rows=budget_rows), Worker(native())
    decode.book.lease(3)  # so that block numbers differ
    got = hand_over(prefill, decode, some(list(range(len(CASES)))))
    assert [got[i] for i in range(len(CASES))] == right


def test_preemption_leaves_no_trace(native: Make, right: list[Outcome]) -> None:
    """Prompts that fill their last block exactly or nearly, in a pool that has no room for their answers."""
    chosen = [i for i, n in enumerate(LENGTHS) if n in (15, 16, 31, 32, 63)]
    worker = Worker(native(n_blocks=11))
    worker.run([Add(worker.sequence(number, CASES[number])) for number in chosen])
    assert worker.n_preempted > 0
    assert [worker.outcomes[number] for number in chosen] == [right[number] for number in chosen]


def test_a_cached_prefix_leaves_no_trace(native: Make, right: list[Outcome]) -> None:
    """The second time all full blocks but the last are found; the third time by a hand-over."""
    prefill, decode = Worker(native()), Worker(native())
    for worker in (prefill, decode):
        for _ in range(2):
            worker.outcomes.clear()
            sequences = [worker.sequence(number, case) for number, case in enumerate(CASES)]
            worker.run([Add(sequence) for sequence in sequences])
            assert [worker.outcomes[number] for number in range(len(CASES))] == right
        assert [sequence.n_cached for sequence in sequences] == [(n - 1) // 16 * 16 for n in LENGTHS]
        worker.outcomes.clear()
    got = hand_over(prefill, decode, some(list(range(len(CASES)))))
    assert [got[i] for i in range(len(CASES))] == right


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_leave_no_trace(native: Make, right: list[Outcome], threads: int) -> None:
    worker = Worker(native(threads=threads))
    worker.run([Add(worker.sequence(number, case)) for number, case in enumerate(CASES)])
    assert [worker.outcomes[number] for number in range(len(CASES))] == right


def test_guesses_leave_no_trace(native: Make, right: list[Outcome]) -> None:
    """Tokens on trial behind the last one, some of them wrong; alone and two at a time, as long as rows are left for any."""
    worker = Worker(native())
    worker.guess(4, right)
    for numbers in (*([n] for n in range(len(CASES))), *([n, n + 1] for n in range(0, len(CASES) - 1, 2))):
        worker.outcomes.clear()
        worker.run([Add(worker.sequence(number, CASES[number], salt=str(numbers))) for number in numbers])
        assert [worker.outcomes[number] for number in numbers] == [right[number] for number in numbers]
    assert worker.n_accepted > 10


@pytest.mark.parametrize("first", range(0, 2000, 200))
def test_random_schedules_leave_no_trace(native: Make, right: list[Outcome], first: int) -> None:
    pairs = [(Worker(native(n_blocks=120, threads=threads)), Worker(native(n_blocks=90, threads=threads))) for threads in (1, 2)]
    for seed in range(first, first + 200):
        random_schedule(seed, pairs, right, CASES)


def test_the_reference_obeys_the_law_too(reference: Make) -> None:
    """Chunked, batched and mixed; disaggregated; on one thread."""
    every = [CASES[i] for i in FEW]
    right = alone(reference, every)
    batched = Worker(reference(), budget_rows=48, max_chunk=23)
    batched.run([Add(batched.sequence(number, case)) for number, case in enumerate(every)])
    assert [batched.outcomes[number] for number in range(len(every))] == right
    got = hand_over(Worker(reference(threads=1)), Worker(reference(threads=2)), dict(enumerate(every)))
    assert [got[i] for i in range(len(every))] == right
