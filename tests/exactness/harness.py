"""Engines on the real model, driven without actors, and what each sequence came to: ids, and a digest of every row of logits."""

import hashlib
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from relay.engine.cuda.pool import DevicePool
from relay.engine.drafter import NgramDrafter
from relay.engine.engine import Add, Engine, Join
from relay.engine.runner import Runner
from relay.engine.sequence import Sequence, Target
from relay.kv.book import BlockBook
from relay.kv.memory import host_memory
from relay.kv.pool import KVPool
from relay.kv.prefix import namespace
from relay.messages import Logprobs, Sampling, Stopping
from relay.policy.batching import StepClock
from tests.engine.guesses import Guesses

LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 65, 127, 129, 255, 257, 300)
N_NEW = 5


@dataclass
class Outcome:
    """Of one sequence. Equal outcomes have bit-identical logits."""

    ids: list[int] = field(default_factory=list)
    logits: list[str] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)


@dataclass(frozen=True)
class Case:
    prompt: tuple[int, ...]
    sampling: Sampling


def cases(vocab: int = 49152) -> list[Case]:
    """Prompts around the edges of blocks, tiles and chunks, under every kind of sampling."""
    draw = random.Random(7)
    kinds = (
        Sampling(temperature=0.0),
        Sampling(temperature=0.8, top_p=0.95, top_k=50, seed=11),
        Sampling(temperature=1.0, seed=12, choice=1),
        Sampling(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.3, logprobs=3),
        Sampling(temperature=0.9, min_p=0.05, seed=13, logit_bias=((5, 2.0), (90, -3.0))),
    )
    prompts = [tuple(draw.randrange(3, vocab) for _ in range(n)) for n in LENGTHS]
    return [Case(prompt, kinds[i % len(kinds)]) for i, prompt in enumerate(prompts)]


def poison(pool: KVPool) -> None:
    """NaN in every float type."""
    if isinstance(pool, DevicePool):
        pool.words.fill_(-1)
    else:
        host_memory(pool).pages[:] = np.uint64(2**64 - 1)


class Worker:
    """One engine. `budget_rows` rows a step, whatever they take; poisoned memory: no slot that nobody wrote may be read."""

    def __init__(self, runner: Runner, *, budget_rows: int = 512, max_chunk: int = 512) -> None:
        self.runner = runner
        runner.keep_logits = True
        poison(runner.memory)
        self.book = BlockBook(runner.layout.n_blocks)
        clock = StepClock(16, budget_rows / 16, 1.0)
        clock.ran = lambda n_rows, n_kv_tokens, ms: None  # type: ignore[method-assign]
        self.clock = clock
        self.engine = Engine(
            runner,
            self.book,
            clock,
            max_running=64,
            max_chunk_tokens=max_chunk,
            floor_ns=lambda rows, kv: 0,
            drafter=lambda _: NgramDrafter(),
        )
        self.engine.on_logits = self._on_logits
        self.outcomes: dict[int, Outcome] = {}
        self.n_preempted = self.n_accepted = 0
        self._known: list[Outcome] = []

    def guess(self, draft_rows: int, known: list[Outcome]) -> None:
        """From now on decode steps are filled with guesses, most of them right: `known` has the answers by number."""
        assert self.engine._speculation is not None
        self.engine._speculation.rows, self._known = draft_rows, known

    def set_pace(self, budget_rows: int, max_chunk: int) -> None:
        """Another chunking from now on."""
        self.clock.budget_rows = lambda n_before=0, *, alone=False: budget_rows  # type: ignore[method-assign]
        self.engine._max_chunk_tokens = max_chunk

    def _on_logits(self, sequence: Sequence, position: int, logits: Any) -> None:
        self.outcomes[sequence.id].logits.append(hashlib.sha256(np.ascontiguousarray(logits).tobytes()).hexdigest())

    def sequence(self, number: int, case: Case, *, salt: str = "", n_new: int = N_NEW, **more: Any) -> Sequence:
        """`number` names its outcome; without blocks the engine finds some, cached ones first."""
        self.outcomes.setdefault(number, Outcome())
        given = {"tokens": list(case.prompt), "side": "decode", "blocks": [], **more}
        return Sequence(
            id=number,
            request_id=str(number),
            attempt=1,
            n_prompt=len(case.prompt),
            sampling=case.sampling,
            stopping=Stopping(max_tokens=n_new),
            root=namespace("m", salt),
            trail=[(0, 0)],
            drafter=Guesses([*case.prompt, *self._known[number].ids], number) if self._known else None,
            **given,
        )

    def run(self, jobs: Iterable[Add | Join]) -> list[Sequence]:
        """Until nothing is left; returns the prefill sequences, whose blocks are still held."""
        handed_over, busy, waiting = [], True, list(jobs)
        while busy:
            report, busy = self.engine.step(waiting)  # type: ignore[arg-type]
            waiting = []
            self.n_preempted += report.n_preempted
            self.n_accepted += report.n_accepted
            assert report.refused == []
            for advance in report.advances:
                outcome = self.outcomes[advance.sequence.id]
                outcome.ids.append(advance.token)
                outcome.logprobs += [advance.logprobs] if advance.logprobs is not None else []
                if advance.sequence.side == "prefill":
                    handed_over.append(advance.sequence)
                elif advance.finish:
                    self.book.free(advance.sequence.blocks)
        assert self.book.counts().audit() == ""
        return handed_over


def hand_over(prefill: Worker, decode: Worker, numbered: dict[int, Case], *, salt: str = "", n_new: int = N_NEW) -> dict[int, Outcome]:
    """Prefill in one pool, push into leased blocks of another, decode there; as the two actors do it."""
    jobs = []
    for number, case in numbered.items():
        lease = decode.book.lease(decode.runner.layout.blocks_for(len(case.prompt)))
        assert lease is not None
        target = Target(decode.runner.memory, tuple(lease), 0)
        jobs.append(Add(prefill.sequence(number, case, salt=salt, n_new=n_new, side="prefill", target=target)))
    joins = []
    for sequence in prefill.run(jobs):
        assert sequence.target is not None
        blocks = list(sequence.target.blocks)
        decode.book.adopt(blocks)
        prefill.book.free(sequence.blocks)
        joined = decode.sequence(
            sequence.id,
            numbered[sequence.id],
            salt=salt,
            n_new=n_new,
            tokens=list(sequence.tokens),
            blocks=blocks,
            n_computed=sequence.n_prompt,
        )
        joins.append(Join(joined, sequence.pushed_checksums(), len(blocks)))
    decode.run(joins)
    return {number: joined_outcome(prefill.outcomes[number], decode.outcomes[number]) for number in numbered}


def joined_outcome(first: Outcome, second: Outcome) -> Outcome:
    return Outcome(first.ids + second.ids, first.logits + second.logits, first.logprobs + second.logprobs)


def shortened(outcome: Outcome, n: int) -> Outcome:
    """What it would have been with fewer tokens."""
    return Outcome(outcome.ids[:n], outcome.logits[:n], outcome.logprobs[:n])


def random_schedule(seed: int, pairs: list[tuple[Worker, Worker]], right: list[Outcome], every: list[Case]) -> None:
    """A few cases in any order, chunking, company, cached or cold, with or without room, in one pool or two; asserts that nothing shows."""
    draw = random.Random(seed)
    prefill, decode = draw.choice(pairs)
    for worker in (prefill, decode):
        worker.outcomes.clear()
        worker.set_pace(draw.choice((16, 32, 64, 512)), draw.choice((5, 16, 23, 64, 512)))
        worker.engine.flies = draw.random() < 0.7
        worker.guess(draw.choice((0, 4, 8)), right)
    longest = draw.choice((2, 17, 17, 33, 33, 65)) if draw.random() < 0.98 else draw.choice((129, 300))
    short = [i for i, case in enumerate(every) if len(case.prompt) <= longest]
    chosen = draw.sample(short, draw.randint(1, min(4, len(short))))
    n_new, salt = draw.choice((1, 1, 2, 2, 3, N_NEW)), draw.choice(("", "", str(seed)))
    numbered = {i: every[i] for i in chosen}
    held = None
    if draw.random() < 0.3:  # little room: preemption, and prompts that wait
        spare = decode.book.n_free() - sum(-(-(len(case.prompt) + n_new) // 16) for case in numbered.values()) - draw.randint(0, 1)
        held = decode.book.lease(max(0, spare))
    if draw.random() < 0.5 and held is None and n_new > 1:
        got = hand_over(prefill, decode, numbered, salt=salt, n_new=n_new)
    else:
        decode.run([Add(decode.sequence(i, case, salt=salt, n_new=n_new)) for i, case in numbered.items()])
        got = decode.outcomes
    if held is not None:
        decode.book.free(held)
    for i in chosen:
        assert got[i] == shortened(right[i], n_new), f"seed {seed}, prompt of {len(every[i].prompt)}"


def alone(make: Callable[[], Runner], every: list[Case]) -> list[Outcome]:
    """Each case by itself, its prompt in one chunk."""
    worker = Worker(make(), budget_rows=4096, max_chunk=4096)
    for number, case in enumerate(every):
        worker.run([Add(worker.sequence(number, case, salt=str(number)))])
    assert all(len(outcome.ids) == len(outcome.logits) == N_NEW for outcome in worker.outcomes.values())
    assert msgspec.msgpack.encode([outcome.logprobs for outcome in worker.outcomes.values()])
    return [worker.outcomes[i] for i in range(len(every))]
