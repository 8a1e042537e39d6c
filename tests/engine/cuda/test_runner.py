"""The CUDA runner in the emulator: what the reference computes, and the same bits however a sequence is computed."""

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest
import torch

from relay.engine.cuda.decode_graphs import Bucket, DecodeGraphs
from relay.engine.cuda.runner import CudaRunner
from relay.engine.cuda.weights import load_weights
from relay.engine.engine import Add
from relay.engine.reference_runner import ReferenceRunner
from relay.engine.runner import Batch, Draw
from relay.engine.sampler import choose
from relay.errors import ModelError
from relay.kernels.emulator.runtime import EmulatedRuntime
from relay.kv.memory import KVMemory
from relay.messages import Sampling
from relay.model.spec import ModelSpec
from relay.model.weights import unpack
from tests.engine.cuda.models import SMALL, checkpoint, device_layout, runner_on, runtime_for
from tests.engine.native_models import variant
from tests.exactness.harness import Case, Outcome, Worker, alone, hand_over, poison

GREEDY = Sampling(temperature=0.0)
KINDS = (
    GREEDY,
    Sampling(temperature=0.8, top_p=0.9, top_k=20, seed=11),
    Sampling(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.3, logprobs=3),
    Sampling(temperature=0.9, min_p=0.05, seed=13, logit_bias=((5, 2.0), (200, -3.0))),
)


def small(**changes: Any) -> ModelSpec:
    shape = {"hidden": 64, "n_heads": 2, "n_kv_heads": 1, "head_dim": 64, "ffn": 96, "vocab_size": 320, "max_context": 512}
    return variant(**{**shape, **changes})


def prompt(n: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(n).integers(0, 320, n).tolist())


CASES = [Case(prompt(n), KINDS[i % 4]) for i, n in enumerate((1, 16, 33, 70, 15))]
ARCHITECTURES: dict[str, tuple[ModelSpec, str | tuple[str, ...], frozenset[str]]] = {
    "llama, tied": (small(tied_embeddings=True), "BF16", frozenset()),
    "biases": (small(architecture="qwen2"), "BF16", frozenset()),
    "head norms": (small(architecture="qwen3", n_heads=3), "BF16", frozenset()),
    "windows": (small(architecture="mistral", windows=(20, 0)), "BF16", frozenset()),
    "several types": (
        small(hidden=256, ffn=256, tied_embeddings=True),
        ("Q8_0", "Q4_0", "Q4_1", "Q6_K", "BF16"),
        frozenset(("Q8_0", "Q4_0", "Q4_1")),
    ),
    "Q8_0 with biases": (small(architecture="qwen2", ffn=128), "Q8_0", frozenset(("Q8_0",))),
}


def rows_of(tokens: tuple[int, ...], begin: int = 0) -> Batch:
    """The rows of one prompt from `begin` on, each drawn greedily."""
    n = len(tokens) - begin
    return Batch(
        tokens=np.asarray(tokens[begin:], np.int32),
        positions=np.arange(begin, len(tokens), dtype=np.int32),
        sequence=np.zeros(n, np.int32),
        block_table=np.arange(-(-len(tokens) // 16), dtype=np.int32)[None],
        logit_rows=np.arange(n, dtype=np.int32),
        draws=tuple(Draw(GREEDY, 0.0, list(tokens[: begin + i + 1]), len(tokens)) for i in range(n)),
    )


@functools.cache
def runner(n_blocks: int = 60) -> CudaRunner:
    return runner_on(checkpoint(), runtime_for(64), n_blocks)


@functools.cache
def right() -> tuple[Outcome, ...]:
    return tuple(alone(runner, CASES))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_are_the_references_within_the_rounding_of_the_step(name: str) -> None:
    spec, kinds, formats = ARCHITECTURES[name]
    source, tokens = checkpoint(kinds, spec), prompt(37)
    on_device = runner_on(source, runtime_for(64, formats), 8, graphs=False)
    poison(on_device.memory)
    got = on_device.step(rows_of(tokens))
    reference = ReferenceRunner(KVMemory(device_layout(spec, 8)), unpack(source), keep_logits=True)
    want = reference.step(rows_of(tokens))
    assert got.logits is not None
    assert want.logits is not None
    assert np.linalg.norm(got.logits - want.logits) < 0.04 * np.linalg.norm(want.logits)
    best = np.sort(want.logits, axis=1)
    clear = best[:, -1] - best[:, -2] >= 0.1 * want.logits.std()
    assert clear.mean() > 0.5
    assert np.array_equal(np.asarray(got.ids)[clear], np.asarray(want.ids)[clear])


def test_torchs_own_attention_can_be_asked_for() -> None:
    """Of chunks from the start and behind others; decode rows stay with our kernel."""
    tokens, ours = prompt(37), runner()
    theirs = runner_on(checkpoint(), runtime_for(64), 8, graphs=False, exact=False, torch_attention=True)
    found = []
    for one in (ours, theirs):
        poison(one.memory)
        parts = [one.step(rows_of(tokens[:end], begin)).logits for begin, end in ((0, 20), (20, 36), (36, 37))]
        found.append(np.concatenate([part for part in parts if part is not None]))
    want, got = found
    assert len(got) == len(tokens)
    assert not np.array_equal(got[:36], want[:36])
    assert np.linalg.norm(got - want) < 0.02 * np.linalg.norm(want)


def test_torchs_own_products_can_be_asked_for_in_graphs_too() -> None:
    tokens, ours = prompt(20), runner()
    theirs = runner_on(checkpoint(), runtime_for(64), 8, exact=False)
    for one in (ours, theirs):
        poison(one.memory)
        one.step(rows_of(tokens[:-1]))
    want, got = ours.step(rows_of(tokens, 19)).logits, theirs.step(rows_of(tokens, 19)).logits
    assert theirs.graphs.n_replays[Bucket(1, 512)] == 1
    assert want is not None
    assert got is not None
    assert np.linalg.norm(got - want) < 0.04 * np.linalg.norm(want)


def test_only_dense_matrices_lose_their_exactness_to_torchs_products() -> None:
    spec, kinds, formats = ARCHITECTURES["Q8_0 with biases"]
    dense, packed = checkpoint(), checkpoint(kinds, spec)
    found = {}
    for name, source, exact in (("dense", dense, False), ("exact", dense, True), ("packed", packed, False)):
        weights = load_weights(source, torch.bfloat16, runtime_for(64, formats), max_rows=8, max_context=64, exact=exact)
        found[name] = weights.exact
    assert found == {"dense": False, "exact": True, "packed": True}


def test_log_probabilities_and_scores_are_the_references() -> None:
    tokens = list(prompt(20))
    draws = tuple(Draw(GREEDY, 0.0, tokens, 20, target=tokens[i + 1], top=2) for i in range(19))
    batch = rows_of(tuple(tokens))
    batch = Batch(batch.tokens, batch.positions, batch.sequence, batch.block_table, batch.logit_rows[:19], draws)
    got = runner().step(batch)
    reference = ReferenceRunner(KVMemory(device_layout(SMALL, 8)), unpack(checkpoint()))
    for ours, theirs in zip(got.logprobs, reference.step(batch).logprobs, strict=True):
        assert ours is not None
        assert theirs is not None
        assert abs(ours.chosen - theirs.chosen) < 0.15
        assert len(ours.top_ids) == 2
    assert got.ids == tokens[1:]


def test_draws_are_the_samplers_on_the_steps_own_logits_whatever_comes_first_in_the_batch() -> None:
    """A chunk before a single row, which the step computes the other way round; penalties count what was generated, not the prompt."""
    one, tokens = runner(), prompt(5)
    top, other = one.step(rows_of(tokens)).ids[-1], one.step(rows_of((7,))).ids[-1]
    fined = Sampling(temperature=0.0, frequency_penalty=50.0, logprobs=1)
    draws = (Draw(fined, 0.0, [top, top], 2), Draw(fined, 0.0, [other, other], 0), Draw(fined, 0.0, [other, top, other], 1))
    batch = Batch(
        tokens=np.asarray([*tokens, 7, 7], np.int32),
        positions=np.asarray([0, 1, 2, 3, 4, 0, 0], np.int32),
        sequence=np.asarray([0, 0, 0, 0, 0, 1, 2], np.int32),
        block_table=np.asarray([[2], [4], [6]], np.int32),
        logit_rows=np.asarray([4, 5, 6], np.int32),
        draws=draws,
    )
    got = one.step(batch)
    assert got.logits is not None
    assert got.ids == [choose(row, draw)[0] for row, draw in zip(got.logits, draws, strict=True)]
    assert got.ids[0] == top
    assert other not in got.ids[1:]
    alone = one.step(rows_of(tokens)).logits
    assert alone is not None
    assert np.array_equal(got.logits[0].view(np.int32), alone[-1].view(np.int32))
    assert np.array_equal(got.logits[1].view(np.int32), got.logits[2].view(np.int32))


@pytest.mark.parametrize("chunk", [5, 64])
def test_chunks_and_batch_mates_leave_no_trace(chunk: int) -> None:
    worker = Worker(runner(), max_chunk=chunk, budget_rows=64)
    worker.run([Add(worker.sequence(number, case)) for number, case in enumerate(CASES)])
    assert tuple(worker.outcomes[number] for number in range(len(CASES))) == right()


def test_disaggregation_leaves_no_trace() -> None:
    prefill, decode = Worker(runner(), budget_rows=64), Worker(runner(50), budget_rows=64)
    decode.book.lease(3)  # so that block numbers differ
    got = hand_over(prefill, decode, dict(enumerate(CASES)))
    assert tuple(got[i] for i in range(len(CASES))) == right()


def test_a_sequence_goes_on_from_its_tokens_as_it_would_have() -> None:
    """What recovery does: prompt and tokens so far are computed anew, and decoding goes on."""
    whole = right()[3]
    worker = Worker(runner(), budget_rows=64)
    tokens = [*CASES[3].prompt, *whole.ids[:2]]
    worker.run([Add(worker.sequence(9, CASES[3], tokens=tokens))])
    assert worker.outcomes[9].ids == whole.ids[2:]
    assert worker.outcomes[9].logits == whole.logits[2:]


def test_preemption_leaves_no_trace() -> None:
    worker = Worker(runner_on(checkpoint(), runtime_for(64), 3), budget_rows=64)
    worker.run([Add(worker.sequence(number, CASES[number])) for number in (1, 4)])
    assert worker.n_preempted > 0
    assert [worker.outcomes[number] for number in (1, 4)] == [right()[1], right()[4]]


def test_a_cached_prefix_leaves_no_trace() -> None:
    worker = Worker(runner(), budget_rows=64)
    for n_cached in ([0, 0], [32, 64]):
        worker.outcomes.clear()
        sequences = [worker.sequence(number, CASES[number]) for number in (2, 3)]
        worker.run([Add(sequence) for sequence in sequences])
        assert [sequence.n_cached for sequence in sequences] == n_cached
        assert [worker.outcomes[number] for number in (2, 3)] == [right()[2], right()[3]]


def test_a_replayed_graph_gives_the_bits_of_an_eager_step_and_is_counted() -> None:
    graphed, eager = runner(), runner_on(checkpoint(), runtime_for(64), 60, graphs=False)
    tokens = prompt(40)
    for each in (graphed, eager):
        poison(each.memory)
        each.step(rows_of(tokens[:-1]))
    before, n_eager = dict(graphed.graphs.n_replays), graphed.n_eager
    got, want = graphed.step(rows_of(tokens, 39)), eager.step(rows_of(tokens, 39))
    assert graphed.graphs.n_replays[Bucket(1, 512)] == before[Bucket(1, 512)] + 1
    assert graphed.n_eager == n_eager
    assert got.logits is not None
    assert want.logits is not None
    assert np.array_equal(got.logits.view(np.int32), want.logits.view(np.int32))
    assert eager.graphs.n_replays == {}


def test_padding_of_a_graph_writes_nothing_into_the_pool() -> None:
    graphed, eager = runner(), runner_on(checkpoint(), runtime_for(64), 60, graphs=False)
    tables = np.array([[3], [5], [7]], np.int32)
    draws = tuple(Draw(GREEDY, 0.0, [9], 1) for _ in range(3))
    rows = np.arange(3, dtype=np.int32)
    before = graphed.graphs.n_replays[Bucket(4, 512)]
    for one in (graphed, eager):
        poison(one.memory)
        one.step(Batch(np.full(3, 9, np.int32), np.zeros(3, np.int32), rows, tables, rows, draws))
    assert graphed.graphs.n_replays[Bucket(4, 512)] == before + 1
    assert torch.equal(graphed.memory.words, eager.memory.words)
    assert set((graphed.memory.words != -1).any(-1).nonzero()[:, 2].tolist()) == {3, 5, 7}


@pytest.mark.parametrize("begin", [0, 19], ids=["chunk", "graph"])
def test_a_launched_step_is_waited_for_when_its_result_is_asked_for(monkeypatch: pytest.MonkeyPatch, begin: int) -> None:
    """Else the host could do nothing meanwhile."""
    one, runtime, batch = runner(), runtime_for(64), rows_of(prompt(20), begin)
    batch = dataclasses.replace(batch, logit_rows=batch.logit_rows[-1:], draws=batch.draws[-1:])
    one.step(rows_of(prompt(20)))
    want, n_replays, waits = one.step(batch), sum(one.graphs.n_replays.values()), list[int]()

    def finish() -> None:
        waits.append(1)
        EmulatedRuntime.finish(runtime)

    monkeypatch.setattr(runtime, "finish", finish)
    pending = one.launch(batch)
    assert waits == []
    got = pending.result()
    assert waits
    assert got.ids == want.ids
    assert sum(one.graphs.n_replays.values()) == n_replays + (begin > 0)


def test_the_smallest_graph_that_holds_a_batch_is_taken() -> None:
    class Nothing:
        def replay(self) -> None:
            pass

    graphs = DecodeGraphs(12, 10000)
    graphs.capture_all(lambda bucket: Nothing())
    assert graphs.buckets()[0] == (12, 10000)
    assert graphs.bucket_for(1, 1) == (1, 2048)
    assert graphs.bucket_for(9, 2049) == (12, 8192)
    assert graphs.bucket_for(12, 10000) == (12, 10000)
    assert graphs.bucket_for(13, 1) is None
    assert graphs.bucket_for(1, 10001) is None
    assert graphs.replay(Bucket(12, 2048))
    assert not graphs.replay(Bucket(3, 2048))
    assert graphs.n_replays[Bucket(12, 2048)] == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": np.full(3, 320, np.int32)}, "not in the vocabulary"),
        ({"sequence": np.full(3, 1, np.int32)}, "not in the block table"),
        ({"positions": np.arange(14, 17, dtype=np.int32)}, "behind the end of its block table"),
        ({"block_table": np.array([[60]], np.int32)}, "blocks that the pool does not have"),
        ({"block_table": np.array([[-1]], np.int32)}, "blocks that the pool does not have"),
        ({"logit_rows": np.array([0, 1, 3], np.int32)}, "one of the step's rows"),
    ],
)
def test_arrays_that_lead_astray_are_refused_before_anything_is_written(change: dict[str, Any], message: str) -> None:
    one = runner()
    poison(one.memory)
    good = rows_of((1, 2, 3))
    given = {name: getattr(good, name) for name in ("tokens", "positions", "sequence", "block_table", "logit_rows", "draws")}
    with pytest.raises(ValueError, match=message):
        one.step(Batch(**{**given, **change}))
    assert (one.memory.words == -1).all()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (variant(), "heads of width 32"),
        (small(architecture="gemma2"), "norms at the outputs of a layer; scaled embeddings"),
        (small(vocab_size=333), "a vocabulary of 333"),
    ],
)
def test_what_the_kernels_do_not_compute_is_refused_by_name(spec: ModelSpec, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        runner_on(checkpoint("BF16", spec), runtime_for(64))
