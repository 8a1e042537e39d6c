"""The law of exactness on the real model: the same bits whatever shares the batch, however a prompt is cut, wherever it is computed.

Prompts around the edges of blocks and chunks, greedy and seeded, each computed alone in one chunk first; then in other chunk sizes,
all in one batch, disaggregated by pushes into another pool, and preempted. Token ids are equal and logits bit-identical: no
difference is accepted.
"""

import hashlib
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from relay.engine.engine import Add, Engine, Join
from relay.engine.reference_runner import ReferenceRunner
from relay.engine.sequence import Sequence, Target
from relay.kv.book import BlockBook
from relay.kv.layout import KVLayout
from relay.kv.memory import KVMemory
from relay.messages import Sampling, Stopping
from relay.model.load import load
from relay.model.weights import Weights
from relay.policy.batching import StepClock

LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 65, 127, 129, 255, 257, 300)
N_NEW = 5
GREEDY, SEEDED = Sampling(temperature=0.0), Sampling(temperature=0.8, top_p=0.95, top_k=50, seed=11)


@dataclass
class Outcome:
    """What a sequence came to: its tokens, and a digest of every row of logits it was drawn from."""

    ids: list[int] = field(default_factory=list)
    logits: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Case:
    prompt: tuple[int, ...]
    sampling: Sampling


@pytest.fixture(scope="module")
def weights(smollm2_path: Path) -> Weights:
    torch.set_num_threads(2)
    return load(smollm2_path)


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    draw = random.Random(7)
    prompts = [tuple(draw.randrange(3, 49152) for _ in range(n)) for n in LENGTHS]
    return [Case(prompt, GREEDY if i % 2 else SEEDED) for i, prompt in enumerate(prompts)]


class Worker:
    """An engine on the real model, driven without actors. `budget_rows` rows a step, whatever they take."""

    def __init__(self, weights: Weights, *, n_blocks: int = 200, budget_rows: int = 512, max_chunk: int = 512, poison: bool = True) -> None:
        spec = weights.spec
        layout = KVLayout(
            n_layers=spec.n_layers, n_kv_heads=spec.n_kv_heads, head_dim=spec.head_dim, block_tokens=16, dtype="float32", n_blocks=n_blocks
        )
        self.memory = KVMemory(layout)
        if poison:
            self.memory.pages[:] = np.uint64(0x7FC00000_7FC00000)  # NaN in every slot that nobody has written
        runner = ReferenceRunner(self.memory, weights)
        runner.keep_logits = True
        self.book = BlockBook(n_blocks)
        clock = StepClock(16, budget_rows / 16, 1.0)
        clock.ran = lambda n_rows, ms: None  # type: ignore[method-assign]
        self.engine = Engine(runner, self.book, clock, max_running=64, max_chunk_tokens=max_chunk, floor_ns=lambda rows, kv: 0)
        self.engine.on_logits = self._on_logits
        self.outcomes: dict[int, Outcome] = {}
        self.n_preempted = 0

    def _on_logits(self, sequence: Sequence, position: int, logits: Any) -> None:
        self.outcomes[sequence.id].logits.append(hashlib.sha256(np.ascontiguousarray(logits).tobytes()).hexdigest())

    def sequence(self, number: int, case: Case, **more: Any) -> Sequence:
        self.outcomes.setdefault(number, Outcome())
        given = {"tokens": list(case.prompt), "side": "decode", "blocks": None, "n_computed": 0, "target": None, **more}
        if given["blocks"] is None:
            given["blocks"] = self.book.allocate(self.memory.layout.blocks_for(len(case.prompt)))
        return Sequence(
            id=number,
            request_id=str(number),
            attempt=1,
            n_prompt=len(case.prompt),
            sampling=case.sampling,
            stopping=Stopping(max_tokens=N_NEW),
            trail=[(0, 0)],
            **given,
        )

    def run(self, jobs: Iterable[Add | Join]) -> list[Sequence]:
        """Until nothing is left; returns the prefill sequences, whose blocks are still held."""
        handed_over, busy, waiting = [], True, list(jobs)
        while busy:
            report, busy = self.engine.step(waiting)  # type: ignore[arg-type]
            waiting = []
            self.n_preempted += report.n_preempted
            assert report.refused == []
            for advance in report.advances:
                self.outcomes[advance.sequence.id].ids.append(advance.token)
                if advance.sequence.side == "prefill":
                    handed_over.append(advance.sequence)
                elif advance.finish:
                    self.book.free(advance.sequence.blocks)
        return handed_over


@pytest.fixture(scope="module")
def alone(weights: Weights, cases: list[Case]) -> list[Outcome]:
    """Each case by itself, its prompt in one chunk."""
    worker = Worker(weights, budget_rows=4096, max_chunk=4096)
    for number, case in enumerate(cases):
        worker.run([Add(worker.sequence(number, case))])
    assert all(len(outcome.ids) == len(outcome.logits) == N_NEW for outcome in worker.outcomes.values())
    return list(worker.outcomes.values())


@pytest.mark.parametrize("chunk", [16, 23, 48])
def test_chunk_sizes_leave_no_trace(weights: Weights, cases: list[Case], alone: list[Outcome], chunk: int) -> None:
    """One chunk of one prompt a step, while those that came before decode."""
    worker = Worker(weights, max_chunk=chunk)
    worker.run([Add(worker.sequence(number, case)) for number, case in enumerate(cases)])
    assert [worker.outcomes[number] for number in range(len(cases))] == alone


def test_batch_mates_leave_no_trace(weights: Weights, cases: list[Case], alone: list[Outcome]) -> None:
    """All at once, in another order, in mixed steps of chunks and decode rows."""
    worker = Worker(weights, budget_rows=64)
    order = list(range(len(cases)))
    random.Random(3).shuffle(order)
    worker.run([Add(worker.sequence(number, cases[number])) for number in order])
    assert [worker.outcomes[number] for number in range(len(cases))] == alone


@pytest.mark.parametrize("budget_rows", [32, 512])
def test_disaggregation_leaves_no_trace(weights: Weights, cases: list[Case], alone: list[Outcome], budget_rows: int) -> None:
    """Prefilled in one pool, pushed into blocks of another, and decoded there in one batch."""
    prefill, decode = Worker(weights, budget_rows=budget_rows), Worker(weights)
    decode.book.lease(3)
    jobs = []
    for number, case in enumerate(cases):
        lease = decode.book.lease(decode.memory.layout.blocks_for(len(case.prompt)))
        assert lease is not None
        jobs.append(Add(prefill.sequence(number, case, side="prefill", target=Target(decode.memory, tuple(lease), 0))))
    joins = []
    for sequence in prefill.run(jobs):
        case = cases[sequence.id]
        assert sequence.target is not None
        blocks = list(sequence.target.blocks)
        decode.book.adopt(blocks)
        joined = decode.sequence(sequence.id, case, tokens=list(sequence.tokens), blocks=blocks, n_computed=len(case.prompt))
        joins.append(Join(joined, sequence.pushed_checksums(), len(blocks)))
    decode.run(joins)
    joint = [
        Outcome(prefill.outcomes[i].ids + decode.outcomes[i].ids, prefill.outcomes[i].logits + decode.outcomes[i].logits)
        for i in range(len(cases))
    ]
    assert joint == alone


def test_preemption_leaves_no_trace(weights: Weights, cases: list[Case], alone: list[Outcome]) -> None:
    """Prompts that fill their last block exactly or nearly, in a pool that has no room for their answers."""
    chosen = [i for i, n in enumerate(LENGTHS) if n in (15, 16, 31, 32, 63)]
    worker = Worker(weights, n_blocks=11)
    worker.run([Add(worker.sequence(number, cases[number])) for number in chosen])
    assert worker.n_preempted > 0
    assert [worker.outcomes[number] for number in chosen] == [alone[number] for number in chosen]


def test_threads_leave_no_trace(weights: Weights, cases: list[Case], alone: list[Outcome]) -> None:
    chosen = [i for i, n in enumerate(LENGTHS) if n in (1, 17, 65, 129)]
    torch.set_num_threads(1)
    try:
        worker = Worker(weights)
        worker.run([Add(worker.sequence(number, cases[number])) for number in chosen])
    finally:
        torch.set_num_threads(2)
    assert [worker.outcomes[number] for number in chosen] == [alone[number] for number in chosen]
