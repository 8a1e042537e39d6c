"""The native runner: the same numbers as the reference, the same bits whatever happens to a sequence, and no index that leads astray."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from relay.engine.native.runner import Activations, NativeRunner, native_layout
from relay.engine.runner import Batch, Draw, Push
from relay.errors import ModelError
from relay.kv.memory import KVMemory, host_memory
from relay.messages import Logprobs, Sampling
from relay.model.gguf_metadata import read_metadata
from relay.model.load import open_checkpoint, read_spec
from relay.model.spec import ModelSpec
from relay.model.weights import unpack
from relay.text.tokenizer import Tokenizer
from tests.engine.native_models import SMALL, NativePool, checkpoint_of, packed_fd, variant
from tests.engine.schedules import BLOCK, Pool, random_tokens

GREEDY = Draw(Sampling(temperature=0.0), 0.0, [], 0)
QUANTIZED = ("Q4_1", "Q8_0", "Q4_0", "Q6_K", "Q4_K")
LENGTHS = [300, 257, 256, 129, 45, 17, 16, 1]  # around the edges of splits, tiles and blocks


@pytest.fixture(scope="module")
def smollm2_fd(smollm2_path: Path) -> Iterator[int]:
    fd = packed_fd(open_checkpoint(smollm2_path))
    yield fd
    os.close(fd)


@pytest.fixture(scope="module")
def small_fd() -> Iterator[int]:
    fd = packed_fd(checkpoint_of(variant(n_heads=8), QUANTIZED))
    yield fd
    os.close(fd)


SMALL8 = variant(n_heads=8)

VARIANTS: dict[str, tuple[ModelSpec, str | tuple[str, ...]]] = {
    "floats": (SMALL, ("F32", "F16", "BF16")),
    "mixed": (SMALL8, (*QUANTIZED, "BF16")),
    "one head width 64, tied": (variant(n_heads=4, n_kv_heads=4, head_dim=64, tied_embeddings=True), "Q8_0"),
    "head width 96, one K/V head": (variant(n_heads=5, n_kv_heads=1, head_dim=96), "Q4_0"),
    "head width 128, seven to one": (variant(n_heads=7, n_kv_heads=1, head_dim=128), "Q8_0"),
    "head width 80, heads that share blocks": (variant(hidden=320, n_heads=5, n_kv_heads=5, head_dim=80), "F16"),
    "odd widths": (variant(hidden=96, ffn=112, vocab_size=301), "F32"),
    "biases": (variant(architecture="qwen2"), "Q8_0"),
    "head norms": (variant(architecture="qwen3"), "Q4_1"),
    "windows": (variant(architecture="mistral", windows=(0, 100)), "Q8_0"),
    "narrow windows": (variant(architecture="mistral", windows=(17, 3)), "F16"),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_architecture_and_type_computes_what_the_reference_does(name: str) -> None:
    spec, kinds = VARIANTS[name]
    checkpoint = checkpoint_of(spec, kinds)
    torch.set_num_threads(2)
    (tokens,) = random_tokens(spec, np.random.default_rng(1), [290])
    (expected,), _ = Pool(unpack(checkpoint), 20, np.random.default_rng(2)).compute([tokens], (300,))
    fd = packed_fd(checkpoint)
    (found,), _ = NativePool(fd, spec, 20, np.random.default_rng(3), "float32", threads=2).compute([tokens], (1, 40))
    os.close(fd)
    assert np.isfinite(found).all()
    assert np.abs(found - expected).max() < 1e-3 * np.abs(expected).max()


@pytest.mark.parametrize("activations", ["a16", "a8"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8", "float32"])
def test_logits_are_the_same_bits_alone_and_in_any_batch(small_fd: int, dtype: str, activations: Activations) -> None:
    def pool(n_blocks: int, seed: int, threads: int) -> NativePool:
        return NativePool(small_fd, SMALL8, n_blocks, np.random.default_rng(seed), dtype, threads=threads, activations=activations)

    sequences = random_tokens(SMALL8, np.random.default_rng(1), LENGTHS)
    alone = [pool(20, 2, 1).compute([tokens], (1,))[0][0] for tokens in sequences]
    assert all(np.isfinite(logits).all() for logits in alone)
    for seed, chunks in enumerate([(1,), (1, 2, 3, 5), (16,), (1, 1, 1, 64), (1, 7, 37, 100), (300,)]):
        together, _ = pool(100, seed, 1 + seed % 3).compute(sequences, chunks)
        for tokens, logits, expected in zip(sequences, together, alone, strict=True):
            assert same_bits(logits, expected), f"{len(tokens)} tokens in chunks of {chunks}"


@pytest.mark.parametrize("windows", [(0, 100), (17, 3)])
def test_windows_leave_the_bits_alone_too(windows: tuple[int, int]) -> None:
    spec = variant(architecture="mistral", windows=windows)
    fd = packed_fd(checkpoint_of(spec, "Q8_0"))
    sequences = random_tokens(spec, np.random.default_rng(1), [560, 270, 33])
    alone = [NativePool(fd, spec, 40, np.random.default_rng(2)).compute([tokens], (1,))[0][0] for tokens in sequences]
    together, _ = NativePool(fd, spec, 80, np.random.default_rng(3), threads=2).compute(sequences, (1, 50, 301))
    os.close(fd)
    assert all(same_bits(logits, expected) for logits, expected in zip(together, alone, strict=True))


def test_real_model_is_exact_over_batches_chunks_threads_and_a_shared_prefix(smollm2_fd: int, smollm2_spec: ModelSpec) -> None:
    sequences = random_tokens(smollm2_spec, np.random.default_rng(7), [290, 140, 33, 18, 5])
    alone = []
    for tokens in sequences:
        pool = NativePool(smollm2_fd, smollm2_spec, 20, np.random.default_rng(8))
        alone.append(pool.compute([tokens], (400,))[0][0])
    for seed, chunks in enumerate([(1, 30), (7, 64, 129)]):
        pool = NativePool(smollm2_fd, smollm2_spec, 40, np.random.default_rng(seed), threads=2 + seed)
        together, tables = pool.compute(sequences, chunks)
        assert all(same_bits(logits, expected) for logits, expected in zip(together, alone, strict=True))
    other = sequences[0].copy()
    other[272:] = sequences[1][:18]
    (found,) = pool.step([(other, 272, 290, tables[0][:17] + pool.allocate(1 * BLOCK + 2))])
    ((expected,), _) = NativePool(smollm2_fd, smollm2_spec, 20, np.random.default_rng(9)).compute([other], (1, 100))
    assert same_bits(found, expected[272:])


@pytest.fixture(scope="module")
def smollm2_spec(smollm2_path: Path) -> ModelSpec:
    return read_spec(smollm2_path)


@pytest.mark.parametrize(
    ("activations", "dtype", "nats"),
    [("a16", "bfloat16", 0.002), ("a16", "float16", 0.0002), ("a16", "int8", 0.006), ("a8", "bfloat16", 0.02)],
)
def test_likelihood_and_clear_tokens_of_the_real_model_are_the_oracles(
    smollm2_fd: int, smollm2_path: Path, smollm2_oracle: dict[str, Any], activations: Activations, dtype: str, nats: float
) -> None:
    memory = KVMemory(native_layout(read_spec(smollm2_path), dtype, 20))
    runner = NativeRunner(memory, smollm2_fd, threads=2, activations=activations)
    licence = smollm2_oracle["license_text_nll"]
    ids = Tokenizer.from_gguf(read_metadata(smollm2_path).metadata).encode(licence["text"])
    nll = -np.mean([found.chosen for found in scored(runner, ids, 1)])
    assert nll == pytest.approx(licence["nll"], abs=nats)
    if activations == "a8" or dtype == "int8":
        return
    n_clear = 0
    for answer in smollm2_oracle["greedy"]:
        found = scored(runner, answer["prompt_ids"] + answer["greedy_ids"], len(answer["prompt_ids"]))
        for logprobs, token, margin in zip(found, answer["greedy_ids"], answer["margin"], strict=True):
            if margin >= 0.1:
                n_clear += 1
                assert logprobs.top_ids[0] == token
    assert n_clear == 606


def scored(runner: NativeRunner, ids: list[int], first: int) -> list[Logprobs]:
    """Teacher forced: the log probability of each of ids[first:], with the two most likely tokens."""
    n = len(ids) - 1
    rows = np.arange(first - 1, n, dtype=np.int32)
    everything = np.arange(n, dtype=np.int32)
    table = np.arange(runner.layout.blocks_for(n), dtype=np.int32)[None]
    draws = tuple(Draw(Sampling(), 0.0, ids, first, target=ids[row + 1], top=2) for row in rows)
    result = runner.step(Batch(np.array(ids[:-1], np.int32), everything, np.zeros(n, np.int32), table, rows, draws))
    assert result.ids == ids[first:]
    return [found for found in result.logprobs if found is not None]


def same_bits(a: NDArray[np.float32], b: NDArray[np.float32]) -> bool:
    return np.array_equal(a.view(np.uint32), b.view(np.uint32))


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_pushed_layers_arrive_with_the_checksums_of_their_source(small_fd: int, dtype: str) -> None:
    tokens = random_tokens(SMALL8, np.random.default_rng(10), [40])[0]
    pool = NativePool(small_fd, SMALL8, 8, np.random.default_rng(11), dtype, threads=2)
    blocks = np.array(pool.allocate(40), np.int32)
    targets = [KVMemory(native_layout(SMALL8, dtype, n_blocks)) for n_blocks in (6, 3)]
    places = [np.array([5, 0, 3], np.int32), np.array([1], np.int32)]
    nothing = np.empty(0, np.int32)
    pushes = (Push(targets[0], blocks, places[0]), Push(targets[1], blocks[2:], places[1]), Push(targets[1], nothing, nothing))
    everything = np.arange(40, dtype=np.int32)
    result = pool.runner.step(Batch(tokens, everything, np.zeros(40, np.int32), blocks[None], nothing, (), pushes))
    assert (result.ids, result.logprobs) == ([], [])
    assert result.push_ns > 0
    for push, sums in zip(pushes, result.checksums, strict=True):
        assert sums.shape == (SMALL8.n_layers, len(push.blocks))
        assert np.array_equal(sums, push.target.checksums(push.target_blocks))
        assert np.array_equal(sums, pool.memory.checksums(push.blocks))
        assert np.array_equal(host_memory(push.target).pages[:, :, push.target_blocks], pool.memory.pages[:, :, push.blocks])
    untouched = np.setdiff1d(np.arange(6), places[0])
    assert not targets[0].pages[:, :, untouched].any()


def batch(*, draws: tuple[Draw, ...] = (GREEDY, GREEDY), pushes: tuple[Push, ...] = (), **arrays: Any) -> Batch:
    """Three rows of one sequence and one of another, in a pool of 4 blocks."""
    found = {
        "tokens": [1, 2, 3, 4],
        "positions": [0, 1, 2, 17],
        "sequence": [1, 1, 1, 0],
        "block_table": [[2, 3], [1, -1]],
        "logit_rows": [2, 3],
        **arrays,
    }
    tokens, positions, sequence, table, logit_rows = (np.array(values, np.int32) for values in found.values())
    return Batch(tokens, positions, sequence, table, logit_rows, draws, pushes)


SAMPLED = Sampling(temperature=0.0, repetition_penalty=1.5)
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a token beyond the vocabulary": ({"tokens": [1, 2, 333, 4]}, r"tokens\[2\] is 333"),
    "a negative token": ({"tokens": [1, -2, 3, 4]}, r"tokens\[1\] is -2"),
    "a position beyond the table": ({"positions": [0, 1, 2, 32]}, r"positions\[3\] is 32"),
    "a negative position": ({"positions": [-1, 1, 2, 17]}, r"positions\[0\] is -1"),
    "a sequence without a table": ({"sequence": [2, 2, 2, 0]}, r"sequence\[0\] is 2"),
    "positions that do not ascend": ({"positions": [0, 2, 2, 17]}, r"positions\[2\] is 2"),
    "a block beyond the pool": ({"block_table": [[4, 3], [1, -1]]}, "has 4 where"),
    "a missing block": ({"block_table": [[2, -1], [1, -1]]}, "has -1 where"),
    "a logit row beyond the rows": ({"logit_rows": [2, 4]}, r"logit_rows\[1\] is 4"),
    "a target beyond the vocabulary": ({"draws": (GREEDY, Draw(Sampling(), 0.0, [], 0, target=333))}, r"draws\[1\] names token 333"),
    "a bias beyond the vocabulary": ({"draws": (Draw(Sampling(logit_bias=((-1, 1.0),)), 0.0, [], 0), GREEDY)}, "names token -1"),
    "a suppressed token beyond the vocabulary": ({"draws": (Draw(Sampling(), 0.0, [], 0, (999,)), GREEDY)}, "names token 999"),
    "a counted token beyond the vocabulary": ({"draws": (Draw(SAMPLED, 0.0, [333], 0), GREEDY)}, "names token 333"),
    "rows without draws": ({"draws": (GREEDY,)}, "each logit row has a draw"),
    "fewer positions than tokens": ({"positions": [0, 1, 2]}, "of one length"),
    "a flat block table": ({"block_table": [1, 2, 3]}, "of one length"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_leads_outside_is_refused_before_anything_is_written(small_fd: int, name: str) -> None:
    changes, message = WRONG[name]
    memory = KVMemory(native_layout(SMALL8, "bfloat16", 4))
    runner = NativeRunner(memory, small_fd, threads=2)
    with pytest.raises(ValueError, match=message):
        runner.step(batch(**changes))
    assert not memory.pages.any()
    assert len(runner.step(batch()).ids) == 2


def test_pushes_that_lead_outside_are_refused(small_fd: int) -> None:
    memory, target = (KVMemory(native_layout(SMALL8, "bfloat16", n)) for n in (4, 2))
    runner = NativeRunner(memory, small_fd, threads=1)

    def push(block: int, place: int, to: KVMemory = target) -> Push:
        return Push(to, np.array([block], np.int32), np.array([place], np.int32))

    for wrong, message in (
        (push(4, 0), "names block 4, which"),
        (push(-1, 0), "names block -1"),
        (push(1, 2), "names block 2 of the target"),
    ):
        with pytest.raises(ValueError, match=message):
            runner.step(batch(pushes=(wrong,)))
    with pytest.raises(ValueError, match="cannot be pushed"):
        runner.step(batch(pushes=(push(1, 1, KVMemory(native_layout(SMALL8, "float16", 2))),)))
    assert not memory.pages.any()
    assert not target.pages.any()


def test_a_pool_of_another_shape_type_or_order_is_refused(small_fd: int) -> None:
    right = native_layout(SMALL8, "bfloat16", 2)
    wrong: tuple[dict[str, Any], ...] = ({"n_layers": 3}, {"order": "token-major"}, {"head_dim": 64})
    for changes in wrong:
        with pytest.raises(ModelError, match="laid out"):
            NativeRunner(KVMemory(msgspec.structs.replace(right, **changes)), small_fd, threads=1)


def test_what_are_not_packed_weights_is_refused() -> None:
    fd = os.memfd_create("other")
    with pytest.raises(OSError, match="empty"):
        NativeRunner(KVMemory(native_layout(SMALL8, "bfloat16", 2)), fd, threads=1)
    os.write(fd, b"x" * 5000)
    with pytest.raises(ModelError, match="packed"):
        NativeRunner(KVMemory(native_layout(SMALL8, "bfloat16", 2)), fd, threads=1)
    os.close(fd)


def test_an_empty_step_and_a_step_without_logits_are_steps(small_fd: int) -> None:
    runner = NativeRunner(KVMemory(native_layout(SMALL8, "bfloat16", 4)), small_fd, threads=2)
    nothing = np.empty(0, np.int32)
    assert runner.step(Batch(nothing, nothing, nothing, np.empty((0, 0), np.int32), nothing, ())).ids == []
    assert runner.step(batch(logit_rows=[], draws=())).ids == []


def test_more_logit_rows_than_a_tile_are_all_drawn_from_their_own(small_fd: int) -> None:
    pool = NativePool(small_fd, SMALL8, 8, np.random.default_rng(1), threads=2)
    tokens = random_tokens(SMALL8, np.random.default_rng(2), [100])[0]
    rows = np.arange(100, dtype=np.int32)
    table = np.array([pool.allocate(100)], np.int32)
    result = pool.runner.step(Batch(tokens, rows, np.zeros(100, np.int32), table, rows, (GREEDY,) * 100))
    assert result.logits is not None
    assert result.ids == result.logits.argmax(-1).tolist()
    some = rows[[3, 40, 41, 99]]
    again = pool.runner.step(Batch(tokens, rows, np.zeros(100, np.int32), table, some, (GREEDY,) * 4))
    assert again.ids == [result.ids[row] for row in some]


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_no_thread_is_idle_while_there_is_work(small_fd: int, threads: int) -> None:
    pool = NativePool(small_fd, SMALL8, 30, np.random.default_rng(1), threads=threads)
    tokens = random_tokens(SMALL8, np.random.default_rng(2), [256])[0]
    for _ in range(40):
        pool.step([(tokens, 0, 256, list(range(16)))])
        if all(counters.chunks > 0 for counters in pool.runner.counters()):
            break
    counters = pool.runner.counters()
    assert len(counters) == threads
    assert all(one.chunks > 0 for one in counters)
    pool.runner.close()


@pytest.mark.parametrize("threads", [1, 2])
def test_an_abandoned_step_ends_early_and_leaves_nothing_behind(small_fd: int, threads: int) -> None:
    pool = NativePool(small_fd, SMALL8, 8, np.random.default_rng(1), threads=threads)
    tokens = random_tokens(SMALL8, np.random.default_rng(2), [100])[0]
    rows, table = np.arange(100, dtype=np.int32), np.array([pool.allocate(100)], np.int32)
    some = Batch(tokens, rows, np.zeros(100, np.int32), table, rows[-1:], (GREEDY,))

    def n_chunks() -> int:
        return sum(counters.chunks for counters in pool.runner.counters())

    whole = pool.runner.step(some)
    n_whole = n_chunks()
    pending = pool.runner.launch(some)
    pending.abandon()
    result = pending.result()
    assert result.abandoned
    assert (result.ids, result.logprobs, result.checksums) == ([], [], [])
    if threads == 1:
        assert n_chunks() - n_whole < n_whole / 10  # nothing had begun: the first phase, and no other
    again = pool.runner.launch(some).result()
    assert not again.abandoned
    assert again.ids == whole.ids
    assert np.array_equal(again.logits, whole.logits)
    pool.runner.close()
