"""The law of exactness on two small models whose layers are unlike the real one's: windows on the native kernels, experts on the reference.

Prompts around the edges of blocks, in choices of one seed, penalized and biased: batched, disaggregated, cached, preempted, and in random
schedules of all that, against each alone.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from relay.engine.engine import Add
from relay.engine.native.pack import pack_into, packed_size
from relay.engine.native.runner import NativeRunner, native_layout
from relay.engine.reference_runner import ReferenceRunner
from relay.kv.layout import KVLayout
from relay.kv.memory import KVMemory
from relay.messages import Sampling
from relay.model.load import load, open_checkpoint, read_spec
from tests.exactness.conftest import Make
from tests.exactness.harness import Case, Outcome, Worker, alone, cases, hand_over, random_schedule

DATA = Path(__file__).parent.parent / "data" / "tiny"
CASES = [case for case in cases(vocab=256) if len(case.prompt) <= 129]
CASES += [Case(CASES[4].prompt, Sampling(temperature=1.0, seed=21, choice=choice)) for choice in range(3)]


def _native(path: Path) -> Iterator[Make]:
    spec, checkpoint = read_spec(path), open_checkpoint(path)
    data = np.zeros(packed_size(checkpoint), np.uint8)
    pack_into(checkpoint, data, threads=1)
    fd = os.memfd_create("weights")
    os.write(fd, data.tobytes())
    yield lambda n_blocks=200, threads=1: NativeRunner(KVMemory(native_layout(spec, "bfloat16", n_blocks)), fd, threads=threads)
    os.close(fd)


def _reference(path: Path) -> Iterator[Make]:
    torch.set_num_threads(1)
    weights = load(path)
    spec = weights.spec

    def make(n_blocks: int = 200, threads: int = 1) -> ReferenceRunner:
        layout = KVLayout(
            n_layers=spec.n_layers, n_kv_heads=spec.n_kv_heads, head_dim=spec.head_dim, block_tokens=16, dtype="float32", n_blocks=n_blocks
        )
        return ReferenceRunner(KVMemory(layout), weights)

    yield make


@pytest.fixture(scope="module", params=["mistral_sliding", "qwen3_moe"])
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    yield from (_native if request.param == "mistral_sliding" else _reference)(DATA / request.param)


@pytest.fixture(scope="module")
def right(make: Make) -> list[Outcome]:
    return alone(make, CASES)


def test_choices_of_one_seed_differ_from_each_other_and_not_from_run_to_run(make: Make, right: list[Outcome]) -> None:
    choices = right[-3:]
    assert len({tuple(choice.ids) for choice in choices}) == 3
    assert len({choice.logits[0] for choice in choices}) == 1  # they share their prompt
    assert alone(make, CASES[-3:]) == choices


def test_batch_mates_chunks_and_a_cached_prefix_leave_no_trace(make: Make, right: list[Outcome]) -> None:
    worker = Worker(make(), budget_rows=48, max_chunk=23)
    for _ in range(2):
        worker.outcomes.clear()
        sequences = [worker.sequence(number, case) for number, case in enumerate(CASES)]
        worker.run([Add(sequence) for sequence in sequences])
        assert [worker.outcomes[number] for number in range(len(CASES))] == right
    assert [sequence.n_cached for sequence in sequences] == [(len(case.prompt) - 1) // 16 * 16 for case in CASES]


def test_disaggregation_leaves_no_trace(make: Make, right: list[Outcome]) -> None:
    prefill, decode = Worker(make(), budget_rows=32), Worker(make())
    decode.book.lease(3)  # so that block numbers differ
    got = hand_over(prefill, decode, dict(enumerate(CASES)))
    assert [got[i] for i in range(len(CASES))] == right


def test_preemption_leaves_no_trace(make: Make, right: list[Outcome]) -> None:
    chosen = [i for i, case in enumerate(CASES) if len(case.prompt) in (15, 16, 31, 32, 63)]
    worker = Worker(make(n_blocks=11))
    worker.run([Add(worker.sequence(number, CASES[number])) for number in chosen])
    assert worker.n_preempted > 0
    assert [worker.outcomes[number] for number in chosen] == [right[number] for number in chosen]


def test_random_schedules_leave_no_trace(make: Make, right: list[Outcome]) -> None:
    pairs = [(Worker(make(n_blocks=120)), Worker(make(n_blocks=90)))]
    for seed in range(60):
        random_schedule(seed, pairs, right, CASES)
