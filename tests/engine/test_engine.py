"""The engine over the modelled runner, whose tokens tell on every wrong KV slot."""

import os
import random
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from numpy.typing import NDArray

from relay.engine.board import BOARD_BYTES, StepBoard, read_board
from relay.engine.drafter import NgramDrafter
from relay.engine.engine import Add, Drop, Engine, Job, Join, Nudge
from relay.engine.keyed_random import uniform
from relay.engine.modelled_runner import ModelledRunner, layout, next_token
from relay.engine.report import StepReport
from relay.engine.runner import Batch, Pending, StepResult
from relay.engine.sequence import Sequence, Target
from relay.kv.book import BlockBook
from relay.kv.memory import KVMemory
from relay.ledger.spans import Span
from relay.messages import Sampling, Stopping
from relay.policy.batching import StepClock
from tests.engine.guesses import Guesses

First = Literal["mixed", "decode", "prefill"]


class BesideRunner(ModelledRunner):
    """`Launches`: computes as late as a device may, when its result is waited for, and from what the batch has become by then."""

    beside = True

    def __init__(self, memory: KVMemory) -> None:
        super().__init__(memory)
        self.events: list[str] = []

    def prepare(self, batch: Batch) -> None:
        self.prepared = batch

    def launch(self, batch: Batch) -> Pending:
        self.events.append("launched")
        return _Beside(self, batch)


class _Beside:
    def __init__(self, runner: BesideRunner, batch: Batch) -> None:
        self._runner, self._batch, self._abandoned = runner, batch, False

    def result(self) -> StepResult:
        self._runner.events.append("waited for")
        return StepResult([], [], [], abandoned=True) if self._abandoned else self._runner.step(self._batch)

    def abandon(self) -> None:
        self._runner.events.append("abandoned")
        self._abandoned = True


GREEDY = Sampling(temperature=0.0)


class Worker:
    """An engine with its pool, and a driver that plays its actor."""

    def __init__(
        self,
        n_blocks: int = 64,
        max_running: int = 64,
        max_chunk: int = 512,
        budget_tiles: int = 2,
        first: First = "mixed",
        runner: type[ModelledRunner] = ModelledRunner,
        flies: bool = False,
        draft_rows: int = 0,
        caching: bool = True,
        verify_bytes_per_ms: int = 1 << 20,
    ) -> None:
        self.memory = KVMemory(layout(n_blocks))
        self.runner = runner(self.memory)
        self.book = BlockBook(n_blocks, caching=caching)
        self.engine = Engine(
            self.runner,
            self.book,
            StepClock(16, 10.0 * budget_tiles, 10.0),
            max_running=max_running,
            max_chunk_tokens=max_chunk,
            floor_ns=lambda n_rows, n_kv_tokens: 0,
            first=first,
            drafter=lambda _: NgramDrafter(),
            draft_rows=draft_rows,
            verify_bytes_per_ms=verify_bytes_per_ms,
        )
        self.engine._clock.ran = lambda n_rows, n_kv_tokens, ms: None  # type: ignore[method-assign]
        self.engine.flies = flies
        self.got: dict[int, list[int]] = {}
        self.finished: dict[int, str] = {}
        self.n_preempted = self.n_accepted = 0
        self._next = 0
        self._first: dict[int, int] = {}

    def sequence(
        self, prompt: list[int], max_tokens: int, *, side: str = "decode", sampling: Sampling = GREEDY, lazy: bool = False, **more: object
    ) -> Sequence:
        """`lazy`: without blocks, which the engine then finds."""
        self._next += 1
        blocks = [] if lazy else self.book.allocate(self.memory.layout.blocks_for(len(prompt)))
        assert blocks is not None
        return Sequence(
            id=self._next,
            side=side,  # type: ignore[arg-type]
            request_id=str(self._next),
            attempt=1,
            tokens=list(prompt),
            n_prompt=len(prompt),
            sampling=sampling,
            stopping=Stopping(max_tokens=max_tokens, **more),  # type: ignore[arg-type]
            blocks=blocks,
            trail=[(0, 0)],
        )

    def step(self, *jobs: Job) -> StepReport:
        report, _ = self.engine.step(list(jobs))
        self.n_preempted += report.n_preempted
        self.n_accepted += report.n_accepted
        for advance in report.advances:
            got = self.got.setdefault(advance.sequence.id, [])
            assert advance.index == self._first.setdefault(advance.sequence.id, advance.index) + len(got)
            got.append(advance.token)
            if advance.finish or advance.sequence.side == "prefill":
                self.finished[advance.sequence.id] = advance.finish or "handed over"
                self.book.free(advance.sequence.blocks)
        for sequence in report.gone:
            self.book.free(sequence.blocks)
        assert self.book.counts().audit() == ""
        return report

    def all_back(self) -> bool:
        """Nothing is held any more."""
        counts = self.book.counts()
        return counts.free + counts.cached == counts.total


def expected(prompt: list[int], n: int, sampling: Sampling = GREEDY) -> list[int]:
    tokens = list(prompt)
    for _ in range(n):
        random_number = uniform(sampling.seed, sampling.choice, len(tokens)) if sampling.temperature > 0 else 0.0
        tokens.append(next_token(tokens, 1000, random_number))
    return tokens[len(prompt) :]


def prompt_of(n: int, seed: int = 0) -> list[int]:
    draw = random.Random(f"{n} {seed}")
    return [draw.randrange(1000) for _ in range(n)]


@pytest.mark.parametrize("n_prompt", [1, 15, 16, 17, 31, 32, 33, 100])
@pytest.mark.parametrize("budget_tiles", [1, 3])
def test_a_sequence_gets_the_tokens_that_its_kv_says(n_prompt: int, budget_tiles: int) -> None:
    worker = Worker(budget_tiles=budget_tiles)
    sequence = worker.sequence(prompt_of(n_prompt), 20)
    worker.step(Add(sequence))
    while sequence.id not in worker.finished:
        worker.step()
    assert worker.got[sequence.id] == expected(prompt_of(n_prompt), 20)
    assert worker.finished[sequence.id] == "length"
    assert worker.all_back()


def test_sequences_in_one_batch_do_not_disturb_each_other() -> None:
    worker = Worker(n_blocks=200, budget_tiles=1)
    sequences = [worker.sequence(prompt_of(n), 1 + n % 7) for n in range(1, 40)]
    worker.step(*(Add(sequence) for sequence in sequences))
    while len(worker.finished) < len(sequences):
        worker.step()
    for n, sequence in enumerate(sequences, 1):
        assert worker.got[sequence.id] == expected(prompt_of(n), 1 + n % 7)
    assert worker.all_back()


def test_without_blocks_the_youngest_is_preempted_and_computed_again() -> None:
    """Twelve answers of five blocks each in a pool of fourteen."""
    worker = Worker(n_blocks=14)
    sampling = Sampling(temperature=1.0, seed=5)
    sequences = [worker.sequence(prompt_of(10, seed), 60, sampling=sampling) for seed in range(12)]
    worker.step(*(Add(sequence) for sequence in sequences))
    while len(worker.finished) < len(sequences):
        worker.step()
    assert worker.n_preempted > 0
    for seed, sequence in enumerate(sequences):
        assert worker.got[sequence.id] == expected(prompt_of(10, seed), 60, sampling)
    assert worker.all_back()


def test_what_a_preempted_sequence_needs_is_not_leased_away() -> None:
    worker = Worker(n_blocks=4)
    a, b = (worker.sequence(prompt_of(16, seed), 40) for seed in range(2))
    worker.step(Add(a), Add(b))
    while not worker.n_preempted:
        worker.step()
    while worker.engine.n_waiting and len(worker.finished) < 1:
        assert worker.book.n_free() == 0 or worker.book.lease(worker.book.n_free() + 1) is None
        worker.step()
    while len(worker.finished) < 2:
        worker.step()
    assert worker.got[b.id] == expected(prompt_of(16, 1), 40)


@pytest.mark.parametrize("n_prompt", [1, 16, 17, 48, 70])
def test_a_prefilled_sequence_goes_on_where_its_kv_was_pushed(n_prompt: int) -> None:
    prefill, decode = Worker(budget_tiles=1), Worker()
    prompt = prompt_of(n_prompt)
    decode.book.lease(3)  # so that block numbers differ on the two sides
    lease = decode.book.lease(decode.memory.layout.blocks_for(n_prompt))
    assert lease is not None
    first = prefill.sequence(prompt, 30, side="prefill")
    first.target = Target(decode.memory, tuple(lease), 0)
    prefill.step(Add(first))
    while first.id not in prefill.finished:
        prefill.step()
    decode.book.adopt(lease)
    second = decode.sequence([*prompt, *prefill.got[first.id]], 30)
    decode.book.free(second.blocks)
    second.blocks, second.n_prompt, second.n_computed = list(lease), n_prompt, n_prompt
    report = decode.step(Join(second, first.pushed_checksums(), len(lease)))
    assert report.refused == []
    while second.id not in decode.finished:
        decode.step()
    assert prefill.got[first.id] + decode.got[second.id] == expected(prompt, 30)


def test_a_damaged_push_is_refused_and_never_computed_with() -> None:
    prefill, decode = Worker(), Worker()
    lease = decode.book.lease(3)
    assert lease is not None
    first = prefill.sequence(prompt_of(40), 5, side="prefill")
    first.target = Target(decode.memory, tuple(lease), 0)
    prefill.step(Add(first))
    while first.id not in prefill.finished:
        prefill.step()
    decode.memory.pages[0, 0, lease[1], 3] ^= 1
    decode.book.adopt(lease)
    second = decode.sequence([*prompt_of(40), 7], 5)
    decode.book.free(second.blocks)
    second.blocks, second.n_prompt, second.n_computed = list(lease), 40, 40
    report = decode.step(Join(second, first.pushed_checksums(), 3))
    assert [sequence.id for sequence, _ in report.refused] == [second.id]
    assert "layer 0, block 1" in report.refused[0][1]
    assert report.advances == []


def handed_over(prefill: Worker, decode: Worker, n_prompt: int, max_tokens: int = 9) -> Join:
    """A prompt that `prefill` has computed and pushed."""
    lease = decode.book.lease(decode.memory.layout.blocks_for(n_prompt))
    assert lease is not None
    first = prefill.sequence(prompt_of(n_prompt), max_tokens, side="prefill")
    first.target = Target(decode.memory, tuple(lease), 0)
    prefill.step(Add(first))
    while first.id not in prefill.finished:
        prefill.step()
    decode.book.adopt(lease)
    second = decode.sequence([*prompt_of(n_prompt), *prefill.got[first.id]], max_tokens)
    decode.book.free(second.blocks)
    second.blocks, second.n_prompt, second.n_computed = list(lease), n_prompt, n_prompt
    return Join(second, first.pushed_checksums(), len(lease))


@pytest.mark.parametrize("runner", [ModelledRunner, BesideRunner])
def test_who_runs_waits_for_a_part_of_a_joining_prompt_at_a_time(runner: type[ModelledRunner], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks are verified in the time of a step; ten need five turns, and the stream gets its token in each."""
    decode = Worker(runner=runner, flies=runner is BesideRunner, verify_bytes_per_ms=layout(1).block_bytes // 4)
    looked_at: list[int] = []
    whole = KVMemory.checksums

    def checksums(memory: KVMemory, blocks: NDArray[np.int32], layer: int | None = None) -> NDArray[np.uint64]:
        if memory is decode.memory and layer is None:
            looked_at.append(len(blocks))
        return whole(memory, blocks, layer)

    running = decode.sequence(prompt_of(5), 30)
    decode.step(Add(running))
    join = handed_over(Worker(), decode, 160)
    monkeypatch.setattr(KVMemory, "checksums", checksums)
    before = len(decode.got[running.id])
    decode.step(join)
    n_turns = 1
    while join.sequence.id not in decode.got:
        n_turns += 1
        decode.step()
    assert len(looked_at) >= 4
    assert max(looked_at) <= 10 * decode.engine._verify_bytes_per_ms // layout(1).block_bytes
    assert sum(looked_at) == 10
    assert len(decode.got[running.id]) - before == n_turns
    while len(decode.finished) < 2:
        decode.step()
    assert decode.got[running.id] == expected(prompt_of(5), 30)
    assert decode.got[join.sequence.id] == expected(prompt_of(160), 9)[1:]
    assert join.sequence.trail == []


def test_nobody_waits_for_a_joining_prompt_where_nothing_runs() -> None:
    decode = Worker(verify_bytes_per_ms=1)
    join = handed_over(Worker(), decode, 160)
    assert [advance.sequence for advance in decode.step(join).advances] == [join.sequence]


def test_damage_in_a_later_part_is_found_and_named() -> None:
    decode = Worker(verify_bytes_per_ms=1)
    decode.step(Add(decode.sequence(prompt_of(5), 30)))
    join = handed_over(Worker(), decode, 64)
    decode.memory.pages[0, 1, join.sequence.blocks[3], 0] ^= 1
    reports = [decode.step(join)] + [decode.step() for _ in range(5)]
    assert [reason for report in reports for _, reason in report.refused] == ["the checksum of layer 0, block 3 of 4 differs"]
    assert join.sequence.id not in decode.got


def test_what_is_dropped_while_it_is_verified_is_gone() -> None:
    decode = Worker(verify_bytes_per_ms=1)
    decode.step(Add(decode.sequence(prompt_of(5), 5)))
    join = handed_over(Worker(), decode, 64)
    decode.step(join)
    assert decode.step(Drop(join.sequence.id)).gone == [join.sequence]
    while not decode.finished:
        decode.step()
    assert join.sequence.id not in decode.got
    assert decode.all_back()


def test_a_dropped_sequence_is_reported_once_and_computes_nothing_more() -> None:
    worker = Worker()
    sequence = worker.sequence(prompt_of(100), 50)
    worker.step(Add(sequence))
    report = worker.step(Drop(sequence.id))
    assert report.gone == [sequence]
    assert report.n_prefill_tokens == 0
    assert worker.step(Drop(sequence.id)).gone == []
    assert worker.all_back()


def test_stop_ids_end_a_sequence_but_not_before_min_tokens() -> None:
    worker = Worker()
    tokens = expected(prompt_of(8), 12)
    early = worker.sequence(prompt_of(8), 12, stop_ids=(tokens[3],))
    late = worker.sequence(prompt_of(8), 12, stop_ids=(tokens[3],), min_tokens=4)
    worker.step(Add(early), Add(late))
    while len(worker.finished) < 2:
        worker.step()
    assert worker.got[early.id] == tokens[:4]
    assert worker.finished[early.id] == "stop"
    assert len(worker.got[late.id]) > 4


def finish(worker: Worker, *sequences: Sequence) -> None:
    worker.step(*(Add(sequence) for sequence in sequences))
    while any(sequence.id not in worker.finished for sequence in sequences):
        worker.step()


@pytest.mark.parametrize("n_prompt", [16, 17, 32, 33, 60, 64])
def test_a_prefix_is_computed_once_and_found_again(n_prompt: int) -> None:
    """nano-vllm#142: also where the prompt is a whole number of blocks; its last token is always computed."""
    worker = Worker()
    prompt = prompt_of(n_prompt)
    first, second = worker.sequence(prompt, 5, lazy=True), worker.sequence(prompt, 5, lazy=True)
    finish(worker, first)
    finish(worker, second)
    assert worker.got[first.id] == worker.got[second.id] == expected(prompt, 5)
    assert first.n_cached == 0
    assert second.n_cached == (n_prompt - 1) // 16 * 16 < n_prompt
    assert worker.all_back()


def test_equal_prompts_at_once_share_what_one_of_them_computes() -> None:
    worker = Worker(n_blocks=30)
    prompt = prompt_of(100)
    sequences = [worker.sequence(prompt, 6, sampling=Sampling(temperature=1.0, seed=1, choice=i), lazy=True) for i in range(8)]
    n_computed = 0
    worker.step(*(Add(sequence) for sequence in sequences))
    while len(worker.finished) < 8:
        n_computed += worker.step().n_prefill_tokens
    assert n_computed < 100 + 7 * 16
    for i, sequence in enumerate(sequences):
        assert worker.got[sequence.id] == expected(prompt, 6, Sampling(temperature=1.0, seed=1, choice=i))


def test_if_the_one_that_computes_is_dropped_another_takes_over() -> None:
    worker = Worker(budget_tiles=1)
    a, b = (worker.sequence(prompt_of(100), 4, lazy=True) for _ in range(2))
    worker.step(Add(a), Add(b))
    assert b.n_computed == 0
    worker.step(Drop(a.id))
    while b.id not in worker.finished:
        worker.step()
    assert worker.got[b.id] == expected(prompt_of(100), 4)


def test_borrowed_blocks_catch_up_by_copying() -> None:
    """Both actors in one worker: a lease cannot be swapped for shared blocks, but bytes can be copied."""
    worker = Worker()
    finish(worker, worker.sequence(prompt_of(70), 1))
    lease = worker.book.lease(5)
    assert lease is not None
    sequence = worker.sequence(prompt_of(70), 9, side="prefill", lazy=True)
    sequence.blocks, sequence.borrowed = lease, True
    n_computed = worker.step(Add(sequence)).n_prefill_tokens
    assert n_computed == 70 - 64
    assert sequence.n_cached == 64
    assert worker.got[sequence.id] == expected(prompt_of(70), 1)


def test_a_prompt_whose_log_probabilities_are_wanted_is_computed_whole() -> None:
    """vllm#8268, vllm#42245."""
    worker = Worker()
    finish(worker, worker.sequence(prompt_of(40), 1, lazy=True))
    sequence = worker.sequence(prompt_of(40), 1, lazy=True)
    sequence.prompt_logprobs = 0
    finish(worker, sequence)
    assert sequence.n_cached == 0
    assert len(sequence.scores) == 39


def test_of_higher_priority_comes_first_and_is_preempted_last() -> None:
    worker = Worker(n_blocks=6, budget_tiles=1)
    low, high = worker.sequence(prompt_of(30), 30, lazy=True), worker.sequence(prompt_of(31), 30, lazy=True)
    low.priority, high.priority = 5, -5
    worker.step(Add(low), Add(high))
    while len(worker.finished) < 2:
        worker.step()
    assert list(worker.finished) == [high.id, low.id]
    assert worker.got[low.id] == expected(prompt_of(30), 30)


def test_who_was_displaced_goes_before_new_prompts_and_the_shortest_first() -> None:
    """Their clients wait in the midst of an answer; shortest first, the median gap is the least."""
    worker = Worker(n_blocks=64, budget_tiles=1)
    fresh, long, short = (worker.sequence(prompt_of(n), 8, lazy=True) for n in (20, 90, 40))
    for displaced in (long, short):
        displaced.n_prompt -= 4  # its last four are an earlier attempt's
    worker.step(Add(fresh), Add(long), Add(short))
    while len(worker.got) < 3:
        worker.step()
    assert list(worker.got) == [short.id, long.id, fresh.id]


def test_a_running_sequence_gains_a_token_in_each_step_whatever_arrives() -> None:
    """vllm#11067: one long answer among newcomers without end."""
    worker = Worker(n_blocks=200, budget_tiles=2)
    long = worker.sequence(prompt_of(20), 100)
    worker.step(Add(long))
    while long.id not in worker.finished:
        before = len(worker.got.get(long.id, ()))
        worker.step(*(Add(worker.sequence(prompt_of(40, n), 2, lazy=True)) for n in range(3)))
        assert len(worker.got.get(long.id, ())) == before + (before > 0 or long.n_computed == 20)
    assert worker.got[long.id] == expected(prompt_of(20), 100)


def test_who_comes_behind_a_long_prompt_is_served_when_that_is_computed() -> None:
    """vllm#53130: a prompt of many chunks does not keep others out, and its last step has room for the next."""
    worker = Worker(n_blocks=200, budget_tiles=2)
    long = worker.sequence(prompt_of(1000), 5, lazy=True)
    worker.step(Add(long))
    newcomers = [worker.sequence(prompt_of(10, n), 2, lazy=True) for n in range(3)]
    worker.step(*(Add(newcomer) for newcomer in newcomers))
    steps = 0
    while not all(newcomer.id in worker.got for newcomer in newcomers):
        worker.step()
        steps += 1
    assert steps <= (1000 + 3 * 10) // 32 + 1


def test_a_preempted_sequence_that_waits_for_blocks_does_not_hold_up_one_that_has_its_own() -> None:
    """Or an aggregated worker stands still: the lease that is not computed holds the very blocks. (simulation, seed 23)"""
    worker = Worker(n_blocks=4, budget_tiles=1)
    decoding = worker.sequence(prompt_of(16), 40)
    worker.step(Add(decoding))
    lease = worker.book.lease(2)
    assert lease is not None
    borrowed = worker.sequence(prompt_of(31, 1), 9, side="prefill", lazy=True)
    borrowed.blocks, borrowed.borrowed = lease, True
    while not worker.n_preempted:
        worker.step()
    worker.step(Add(borrowed))
    while borrowed.id not in worker.finished:
        worker.step()
    while decoding.id not in worker.finished:
        worker.step()
    assert worker.got[decoding.id] == expected(prompt_of(16), 40)


def test_two_that_compute_one_prefix_never_wait_for_each_other() -> None:
    """Without a cache, of three with one prompt, the first gone: one owned the first block, one the second. (simulation, seed 79)"""
    worker = Worker(budget_tiles=1, caching=False)
    first = worker.sequence(prompt_of(70), 3)
    worker.step(Add(first))
    pair = []
    for _ in range(2):
        borrowed = worker.sequence(prompt_of(70), 3, side="prefill", lazy=True)
        lease = worker.book.lease(5)
        assert lease is not None
        borrowed.blocks, borrowed.borrowed = lease, True
        pair.append(borrowed)
    worker.step(Add(pair[0]))
    worker.step(Drop(first.id), Add(pair[1]))
    for _ in range(20):
        worker.step()
    assert {pair[0].id, pair[1].id} <= set(worker.finished)


def test_a_prompt_waits_for_blocks_and_goes_on_after_a_nudge() -> None:
    worker = Worker(n_blocks=4)
    held = worker.book.allocate(3)
    assert held is not None
    sequence = worker.sequence(prompt_of(40), 1, lazy=True)
    _, busy = worker.engine.step([Add(sequence)])
    assert not busy
    worker.book.free(held)
    worker.step(Nudge())
    while sequence.id not in worker.finished:
        worker.step()
    assert worker.got[sequence.id] == expected(prompt_of(40), 1)


def test_a_suspect_shares_no_step_until_it_has_gained_tokens_in_two() -> None:
    worker = Worker(budget_tiles=1)
    other, suspect = worker.sequence(prompt_of(20, 1), 12), worker.sequence(prompt_of(40, 2), 6)
    suspect.lone = True
    worker.step(Add(other))
    worker.step()
    report = worker.step(Add(suspect))
    while len(worker.got.get(suspect.id, ())) < 2:
        assert (report.n_decode_rows, report.n_prefill_tokens) in ((0, 16), (0, 8), (1, 0))  # the last is the other's own, or its second
        report = worker.step()
    while len(worker.finished) < 2:
        worker.step()
    assert worker.got[other.id] == expected(prompt_of(20, 1), 12)
    assert worker.got[suspect.id] == expected(prompt_of(40, 2), 6)


def test_the_board_names_who_is_in_a_step_and_nobody_between(tmp_path: Path) -> None:
    path = tmp_path / "board"
    path.write_bytes(bytes(BOARD_BYTES))
    fd = os.open(path, os.O_RDWR)
    worker = Worker()
    worker.engine._board = StepBoard(os.dup(fd))
    seen: list[tuple[tuple[str, ...], bool]] = []
    step = worker.runner.step

    def look(batch: Batch) -> StepResult:
        seen.append(read_board(fd))
        return step(batch)

    worker.runner.step = look  # type: ignore[method-assign]
    first, second = worker.sequence(prompt_of(5), 3), worker.sequence(prompt_of(6), 3)
    second.lone = True
    worker.step(Add(first), Add(second))
    worker.step()
    worker.step()
    assert seen[:2] == [(("2",), True)] * 2  # its first token may have died with its worker, so that the second step is its trial too
    assert seen[2] in ((("1", "2"), False), (("2", "1"), False))
    assert read_board(fd) == ((), False)
    worker.engine._board.announce_kill()
    worker.engine._board.begin(["2"], lone=True)
    assert read_board(fd) == (("2",), False)  # suspected, by what else it was in, but not convicted
    worker.engine._board.end()
    assert read_board(fd) == ((), False)
    os.pwrite(fd, b"\xff" * 64, 0)
    assert read_board(fd) == ((), False)
    os.close(fd)


@pytest.mark.parametrize("draft_rows", [0, 6])
@pytest.mark.parametrize(("runner", "flies"), [(ModelledRunner, False), (BesideRunner, False), (BesideRunner, True)])
def test_any_schedule_gives_the_same_tokens(runner: type[ModelledRunner], flies: bool, draft_rows: int) -> None:
    """100 random schedules: arrivals, chunk budgets, pool sizes, drops, guesses; random numbers, stop ids that may not come yet."""
    n_preempted = n_accepted = 0
    for seed in range(100):
        draw = random.Random(seed)
        n_blocks, most, tiles = draw.randint(12, 40), draw.randint(1, 9), draw.randint(1, 4)
        worker = Worker(n_blocks, most, budget_tiles=tiles, runner=runner, flies=flies, draft_rows=draft_rows)
        sampling = Sampling(temperature=draw.choice((0.0, 1.0)), seed=seed)
        worker.engine._max_chunk_tokens = draw.choice((1, 7, 16, 100))
        prefix = prompt_of(draw.randint(0, 40), seed)
        left = [(prefix + prompt_of(draw.randint(1, 30), i), draw.randint(1, 40)) for i in range(draw.randint(1, 10))]
        live: dict[int, tuple[list[int], int]] = {}
        dropped: set[int] = set()
        while left or len(worker.finished.keys() | dropped) < len(live):
            jobs: list[Job] = []
            while left and draw.random() < 0.3:
                if worker.book.n_free() < 8:
                    break
                prompt, n = left.pop()
                sequence = worker.sequence(prompt, n, lazy=draw.random() < 0.5, sampling=sampling)
                sequence.drafter = Guesses(prompt + expected(prompt, n, sampling), f"{seed} {sequence.id}")
                live[sequence.id] = prompt, n
                jobs.append(Add(sequence))
            if live and draw.random() < 0.02:
                victim = draw.choice(list(live))
                if (
                    victim not in worker.finished
                    and victim not in dropped
                    and not any(isinstance(j, Add) and j.sequence.id == victim for j in jobs)
                ):
                    jobs.append(Drop(victim))
                    dropped.add(victim)
            worker.step(*jobs)
        worker.step()  # what was dropped while a step was in flight
        for id_, (prompt, n) in live.items():
            if id_ not in dropped:
                assert worker.got[id_] == expected(prompt, n, sampling), f"seed {seed}"
        assert worker.all_back(), f"seed {seed}"
        n_preempted += worker.n_preempted
        n_accepted += worker.n_accepted
    assert n_preempted > 0
    assert (n_accepted > 0) == (draft_rows > 0)


def test_what_the_next_step_needs_is_made_while_a_device_computes_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random numbers, tables, blocks for the next tokens, keys of a prompt that has just come; and then nothing of it is left to do."""
    worker = Worker(runner=BesideRunner, budget_tiles=4)
    assert isinstance(worker.runner, BesideRunner)
    events = worker.runner.events
    some = [worker.sequence(prompt_of(14 + n), 40, sampling=Sampling(seed=n)) for n in range(3)]
    worker.step(*(Add(sequence) for sequence in some))
    coming = worker.sequence(prompt_of(100), 2, lazy=True)
    worker.engine.arrived = lambda: [Add(coming)]

    def watched(seed: int, choice: int, position: int) -> float:
        events.append(f"number {seed}, {position}")
        return uniform(seed, choice, position)

    monkeypatch.setattr("relay.engine.ahead.uniform", watched)
    events.clear()
    held = [len(sequence.blocks) for sequence in some]
    assert held == [1, 1, 2]
    worker.step()
    assert events == ["launched", "number 0, 16", "number 1, 17", "number 2, 18", "waited for"]
    assert [len(sequence.blocks) for sequence in some] == [1, 2, 2]
    assert len(coming.keys) == 6
    taken: list[int] = []

    def allocate(n: int) -> list[int] | None:
        taken.append(n)
        return BlockBook.allocate(worker.book, n)

    monkeypatch.setattr(worker.book, "allocate", allocate)
    worker.engine.arrived = list
    worker.step()
    assert events[5:] == ["launched", "number 0, 17", "number 1, 18", "number 2, 19", "waited for"]
    assert taken == [1]  # for the first, ahead of its 17th token


def test_a_step_of_which_all_is_known_begins_before_the_one_before_it_is_reported() -> None:
    """With the tokens that this one drew; and then it is the next report, whatever has come meanwhile."""
    worker = Worker(runner=BesideRunner, flies=True)
    assert isinstance(worker.runner, BesideRunner)
    events, answers = worker.runner.events, [expected(prompt_of(n), 30) for n in (5, 14, 20)]
    one, two, late = (worker.sequence(prompt_of(n), 8) for n in (5, 14, 20))
    worker.step(Add(one), Add(two))
    assert events == ["launched", "waited for"]  # a prompt's tokens are nobody's row ahead
    report = worker.step()
    assert events[2:] == ["launched", "waited for", "launched"]
    assert worker.runner.prepared.tokens.tolist() == [answers[0][1], answers[1][1]]
    assert [advance.token for advance in report.advances] == [answers[0][1], answers[1][1]]
    events.clear()
    worker.step(Add(late), Drop(two.id))  # the step in flight is without the one, and with the other
    assert events == ["waited for"]
    assert [len(worker.got[each.id]) for each in (one, two)] == [3, 3]
    worker.step()
    assert worker.got[late.id] == answers[2][:1]
    assert len(worker.got[two.id]) == 3
    while len(worker.finished) < 2:
        worker.step()
    assert worker.got[one.id] == answers[0][:8]
    assert worker.got[late.id] == answers[2][:8]
    assert worker.all_back()


def test_nothing_is_in_flight_where_a_token_was_the_last_or_a_block_is_lacking() -> None:
    answer = expected(prompt_of(14), 30)
    for more, n_blocks in (({"stop_ids": (answer[4],)}, 8), ({}, 1)):
        worker = Worker(n_blocks=n_blocks, runner=BesideRunner, flies=True)
        assert isinstance(worker.runner, BesideRunner)
        sequence = worker.sequence(prompt_of(14), 30, **more)  # type: ignore[arg-type]
        worker.step(Add(sequence))
        while not worker.finished and not worker.engine.n_waiting:
            n_tokens, _ = len(sequence.tokens), worker.step()
            in_flight = worker.runner.events.count("launched") - worker.runner.events.count("waited for")
            assert in_flight == (worker.finished == {} and n_tokens < 16 * n_blocks and worker.engine.n_waiting == 0), n_tokens
        assert worker.got[sequence.id] == answer[: len(worker.got[sequence.id])]


def test_where_nothing_computes_beside_the_host_each_step_is_told_of_before_the_next() -> None:
    worker = Worker(flies=True, draft_rows=4)
    sequence = worker.sequence(prompt_of(5), 9)
    assert len(worker.step(Add(sequence)).advances) == 1
    for n in range(2, 10):
        assert worker.engine._flight is None
        worker.step()
        assert worker.got[sequence.id] == expected(prompt_of(5), n)


@pytest.mark.parametrize("first", ["mixed", "decode", "prefill"])
def test_those_that_run_stand_still_for_one_chunk_of_a_suspect_at_a_time(first: First) -> None:
    worker = Worker(n_blocks=128, budget_tiles=1, first=first)
    running = worker.sequence(prompt_of(5), 60)
    worker.step(Add(running))
    suspect, other = worker.sequence(prompt_of(300), 3), worker.sequence(prompt_of(40), 3)
    suspect.lone = True
    still, longest, began = 0, 0, False
    worker.step(Add(suspect), Add(other))
    while suspect.id not in worker.got:
        report = worker.step()
        assert report.n_prefill_tokens == 0 or report.n_decode_rows == 0
        assert other.n_computed == 0
        still = 0 if any(advance.sequence is running for advance in report.advances) else still + 1
        longest, began = max(longest, still), True
    assert began
    assert longest == 1
    while len(worker.finished) < 3:
        worker.step()
    assert worker.got == {
        running.id: expected(prompt_of(5), 60),
        suspect.id: expected(prompt_of(300), 3),
        other.id: expected(prompt_of(40), 3),
    }


def test_a_suspect_is_followed_by_no_step_that_the_board_would_call_lone() -> None:
    worker = Worker(runner=BesideRunner, flies=True)
    sequence = worker.sequence(prompt_of(5), 9)
    worker.step(Add(sequence))
    sequence.lone = True
    worker.step()
    assert worker.engine._flight is None
    worker.step()
    assert worker.engine._flight is not None
    worker.engine.settle()
    assert worker.engine._flight is None


def test_a_report_is_told_once_its_first_tokens_are_there_or_the_next_step_computes() -> None:
    worker = Worker(runner=BesideRunner, flies=True)
    assert isinstance(worker.runner, BesideRunner)
    events = worker.runner.events
    worker.engine.computes = lambda: events.append("told")
    one, two = worker.sequence(prompt_of(5), 9), worker.sequence(prompt_of(5, 1), 9)
    worker.step(Add(one))
    assert events == ["launched", "waited for"]
    report = worker.step()  # the first token before the next step is made, its own once that computes
    assert events[2:] == ["told", "launched", "waited for", "launched"]
    said = report.trail
    following = worker.step(Add(two))
    assert events[6:] == ["told", "waited for"]
    assert report.trail == said  # how long it lay there is its tokens' journey, and not the step's
    assert report.trail[-1] == following.trail[0] == (Span.DECODE_HOST, following.began_ns)
    worker.step()  # computes a prompt: before it is launched
    assert events[8:] == ["told", "launched", "waited for"]


def test_settling_leaves_nobody_on_the_board(tmp_path: Path) -> None:
    worker = Worker(runner=BesideRunner, flies=True)
    fd = os.open(tmp_path / "board", os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, BOARD_BYTES)
    worker.engine._board = StepBoard(os.dup(fd))
    worker.step(Add(worker.sequence(prompt_of(5), 9)))
    worker.step()
    assert read_board(fd) == (("1",), False)
    worker.engine.settle()
    assert read_board(fd) == ((), False)
    os.close(fd)


def test_what_a_step_raises_beside_a_launched_one_is_settled() -> None:
    worker = Worker(runner=BesideRunner, flies=True)
    assert isinstance(worker.runner, BesideRunner)

    def fails() -> None:
        raise MemoryError

    worker.step(Add(worker.sequence(prompt_of(5), 9)))
    worker.engine.arrived = fails  # type: ignore[assignment]
    with pytest.raises(MemoryError):
        worker.step()
    worker.engine.settle()
    assert worker.runner.events[-3:] == ["launched", "abandoned", "waited for"]


def test_no_block_is_given_early_where_there_are_not_enough_for_all() -> None:
    worker = Worker(n_blocks=3, runner=BesideRunner)
    some = [worker.sequence(prompt_of(15, n), 4) for n in range(2)]
    worker.step(*(Add(sequence) for sequence in some))
    worker.step()
    assert [len(sequence.tokens) for sequence in some] == [17, 17]
    assert [len(sequence.blocks) for sequence in some] == [1, 1]
    while len(worker.finished) < 2:
        worker.step()
    assert [worker.got[sequence.id] for sequence in some] == [expected(prompt_of(15, n), 4) for n in range(2)]
    assert worker.n_preempted == 1


def test_a_sequence_that_ends_or_goes_while_its_next_row_was_made_leaves_no_trace() -> None:
    """By a stop id, by being dropped, by being preempted and computed anew."""
    answer = expected(prompt_of(16), 30)
    worker = Worker(n_blocks=12, runner=BesideRunner)
    ends, goes, stays = (worker.sequence(prompt_of(16), 30, stop_ids=stop) for stop in ((answer[6],), (), ()))
    worker.step(Add(ends), Add(goes), Add(stays))
    for _ in range(4):
        worker.step()
    worker.step(Drop(goes.id))
    worker.engine._preempt(stays)
    while len(worker.finished) < 2:
        worker.step()
    assert worker.got[ends.id] == answer[: answer.index(answer[6]) + 1]
    assert worker.got[stays.id] == answer
    assert worker.all_back()


@pytest.mark.parametrize(
    ("first", "rows"),
    [
        ("mixed", [(1, 31), (1, 31), (1, 31), (1, 31), (1, 31)]),
        ("decode", [(1, 15), (1, 15), (1, 15), (1, 15), (1, 15)]),
        ("prefill", [(0, 32), (0, 32), (0, 32), (0, 32), (1, 31)]),
    ],
)
def test_who_comes_first_is_as_configured_and_changes_no_token(first: First, rows: list[tuple[int, int]]) -> None:
    worker = Worker(first=first)
    running, waiting = worker.sequence(prompt_of(5), 60), worker.sequence(prompt_of(300), 4)
    worker.step(Add(running))
    reports = [worker.step(Add(waiting))] + [worker.step() for _ in range(4)]
    assert [(report.n_decode_rows, report.n_prefill_tokens) for report in reports] == rows
    while len(worker.finished) < 2:
        worker.step()
    assert worker.got == {running.id: expected(prompt_of(5), 60), waiting.id: expected(prompt_of(300), 4)}


def dropping(worker: Worker, *sequences: Sequence) -> None:
    """While the next step is computed, they are dropped, as by the actor's thread."""
    worker.engine.arrived = lambda: [Drop(sequence.id) for sequence in sequences]


def test_a_step_of_prompts_that_are_all_dropped_meanwhile_is_abandoned() -> None:
    worker = Worker(runner=BesideRunner)
    assert isinstance(worker.runner, BesideRunner)
    one, two = worker.sequence(prompt_of(20), 5), worker.sequence(prompt_of(5), 5)
    dropping(worker, one, two)
    report = worker.step(Add(one), Add(two))
    assert worker.runner.events == ["launched", "abandoned", "waited for"]
    assert (report.advances, report.n_prefill_tokens) == ([], 0)
    worker.engine.arrived = list
    assert worker.step(Drop(one.id), Drop(two.id)).gone == [one, two]
    assert worker.all_back()
    assert worker.book.counts().cached == 0  # nothing of them was taken for computed
    other = worker.sequence(prompt_of(20), 5)
    worker.step(Add(other))
    while not worker.finished:
        worker.step()
    assert worker.got[other.id] == expected(prompt_of(20), 5)


def test_a_step_that_somebody_wants_yet_is_computed_to_its_end() -> None:
    worker = Worker(runner=BesideRunner)
    assert isinstance(worker.runner, BesideRunner)
    one, two = worker.sequence(prompt_of(20), 5), worker.sequence(prompt_of(5), 5)
    dropping(worker, one)
    assert [advance.sequence for advance in worker.step(Add(one), Add(two)).advances] == [one, two]
    dropping(worker, one, two)
    worker.step()  # they decode: that is a short step
    assert "abandoned" not in worker.runner.events
    assert worker.got[two.id] == expected(prompt_of(5), 2)


def test_a_drop_from_another_thread_abandons_the_step_that_is_computed_for_it_alone() -> None:
    worker = Worker(runner=BesideRunner)
    assert isinstance(worker.runner, BesideRunner)
    sequence = worker.sequence(prompt_of(20), 5)
    worker.engine.forgo(sequence.id)  # nothing is under way

    def meanwhile() -> list[Job]:
        worker.engine.forgo(sequence.id)
        return []

    worker.engine.arrived = meanwhile
    assert worker.step(Add(sequence)).advances == []
    assert "abandoned" in worker.runner.events
    worker.engine.arrived = list
    other = worker.sequence(prompt_of(7), 2)
    worker.step(Drop(sequence.id), Add(other))
    assert worker.got == {other.id: expected(prompt_of(7), 1)}


def test_settling_does_not_wait_for_a_whole_step() -> None:
    worker = Worker(runner=BesideRunner, flies=True)
    assert isinstance(worker.runner, BesideRunner)
    worker.step(Add(worker.sequence(prompt_of(5), 9)))
    worker.step()
    worker.engine.settle()
    assert worker.runner.events[-3:] == ["launched", "abandoned", "waited for"]


def test_prompts_are_computed_in_long_steps_where_no_stream_waits_meanwhile() -> None:
    worker = Worker(n_blocks=200)
    worker.engine._clock.budget_rows = lambda n_before=0, *, alone=False: 320 if alone else 32  # type: ignore[method-assign]
    worker.step(Add(worker.sequence(prompt_of(300), 4)))
    assert [len(got) for got in worker.got.values()] == [1]
    beside = worker.sequence(prompt_of(300, 1), 4)
    assert worker.step(Add(beside)).n_prefill_tokens == 31  # the first one decodes
    while not worker.finished:
        worker.step()
    assert worker.step().n_prefill_tokens > 31
    three = [worker.sequence(prompt_of(n, n), 1) for n in (100, 20, 200)]
    while beside.id not in worker.finished:
        worker.step()
    report = worker.step(*(Add(sequence) for sequence in three))
    assert ([advance.sequence for advance in report.advances], report.n_prefill_tokens) == (three[:1], 100)  # each its own
    report = worker.step()
    assert ([advance.sequence for advance in report.advances], report.n_prefill_tokens) == (three[1:2], 32)  # or what is usual
    recovering = worker.sequence(prompt_of(300, 2), 4)
    recovering.n_prompt = 290  # another worker gave ten tokens of it
    other = worker.sequence(prompt_of(300, 3), 1)
    worker.step()
    assert worker.step(Add(other), Add(recovering)).n_prefill_tokens == 300  # it is the first, and nobody else waits for a token


def test_a_prompt_that_comes_back_to_decode_here_does_not_wait_behind_a_long_step() -> None:
    worker = Worker(n_blocks=200)
    worker.engine._clock.budget_rows = lambda n_before=0, *, alone=False: 320 if alone else 32  # type: ignore[method-assign]
    lease = worker.book.lease(2)
    assert lease is not None
    first = worker.sequence(prompt_of(30), 4, side="prefill", lazy=True)
    first.blocks, first.borrowed = lease, True
    other = worker.sequence(prompt_of(300, 1), 4)
    assert worker.step(Add(first), Add(other)).advances[0].sequence is first
    assert worker.step().n_prefill_tokens == 32
    assert worker.step().n_prefill_tokens > 200  # it has not come
