"""The law of exactness: a row's logits depend on the tokens at and before it in its own sequence and on nothing else, bit for bit."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from relay.engine.reference_runner import ReferenceRunner
from relay.engine.runner import Batch, Push
from relay.errors import ModelError
from relay.kv.layout import KVLayout
from relay.kv.memory import KVMemory, host_memory
from relay.model.load import load
from relay.model.weights import Weights
from tests.engine.schedules import BLOCK, TINY, Pool, random_tokens, random_weights

LENGTHS = [300, 129, 128, 45, 17, 16, 1]  # around the edges of splits, tiles and blocks
ONE_BY_ONE = (1,)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tiny() -> Weights:
    return random_weights(TINY)


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Weights:
    return load(smollm2_path)


@pytest.mark.parametrize(("dtype", "n_schedules"), [("float32", 12), ("bfloat16", 3)])
def test_logits_and_kv_are_the_same_bits_alone_and_in_any_batch(tiny: Weights, dtype: str, n_schedules: int) -> None:
    torch.set_num_threads(1)
    sequences = random_tokens(TINY, np.random.default_rng(1), LENGTHS)
    alone = []
    for tokens in sequences:
        pool = Pool(tiny, 20, np.random.default_rng(2), dtype)
        (logits,), (blocks,) = pool.compute([tokens], ONE_BY_ONE)
        assert np.isfinite(logits).all()
        alone.append((logits, pool.written(blocks, len(tokens)).copy()))
    for seed in range(n_schedules):
        torch.set_num_threads(1 + seed % 2)
        chunks = [(1,), (1, 2, 3, 5), (16,), (1, 1, 1, 64), (1, 7, 37, 100), (300,)][seed % 6]
        pool = Pool(tiny, 60, np.random.default_rng(seed), dtype)
        together, tables = pool.compute(sequences, chunks)
        for tokens, logits, blocks, (expected, kv) in zip(sequences, together, tables, alone, strict=True):
            assert np.array_equal(logits, expected), f"schedule {seed}: {len(tokens)} tokens in chunks of {chunks}"
            assert np.array_equal(pool.written(blocks, len(tokens)), kv)


def test_every_place_in_a_tile_gives_the_same_bits(tiny: Weights) -> None:
    tokens, *others = random_tokens(TINY, np.random.default_rng(3), [40] + [9] * 15)
    pool = Pool(tiny, 40, np.random.default_rng(4))
    mine = pool.allocate(40)
    (expected,) = pool.step([(tokens, 0, 40, mine)])
    tables = [pool.allocate(9) for _ in others]
    for place in range(16):
        parts = [(other, 0, 1, blocks) for other, blocks in zip(others, tables, strict=True)]
        parts.insert(place, (tokens, 39, 40, mine))
        assert np.array_equal(pool.step(parts)[place], expected[39:])


@pytest.mark.parametrize("heads", ["7/1/64", "10/1/128", "1/1/32", "14/2/16", "5/5/16", "18/2/16"])
def test_any_number_of_heads_is_exact(heads: str) -> None:
    """With one K/V head, operands of the batched products were views with other strides, which summed in another order."""
    n_heads, n_kv_heads, head_dim = (int(part) for part in heads.split("/"))
    weights = random_weights(msgspec.structs.replace(TINY, n_heads=n_heads, n_kv_heads=n_kv_heads, head_dim=head_dim, n_layers=1))
    sequences = random_tokens(weights.spec, np.random.default_rng(14), [40, 17, 3])
    torch.set_num_threads(1)
    alone = [Pool(weights, 4, np.random.default_rng(15)).compute([tokens], (1,))[0][0] for tokens in sequences]
    for n_threads in (1, 2):
        torch.set_num_threads(n_threads)
        together, _ = Pool(weights, 12, np.random.default_rng(n_threads)).compute(sequences, (1, 7, 40))
        for logits, right in zip(together, alone, strict=True):
            assert np.array_equal(logits, right)


def test_threads_leave_the_bits_of_wide_rows_alone() -> None:
    """Wide enough that torch shares elementwise operations and reductions out to threads, at odd places."""
    wide = random_weights(
        msgspec.structs.replace(TINY, n_heads=36, n_kv_heads=4, head_dim=16, ffn=4099, hidden=2100, n_layers=1, windows=(0,))
    )
    tokens = random_tokens(wide.spec, np.random.default_rng(12), [60])[0]
    found = []
    for n_threads in (1, 2, 3):
        torch.set_num_threads(n_threads)
        (logits,), _ = Pool(wide, 4, np.random.default_rng(13)).compute([tokens], (60,))
        found.append(logits)
    assert np.array_equal(found[0], found[1])
    assert np.array_equal(found[0], found[2])


def test_a_shared_prefix_gives_the_same_bits(tiny: Weights) -> None:
    tokens, other = random_tokens(TINY, np.random.default_rng(5), [150, 150])
    other[: 8 * BLOCK] = tokens[: 8 * BLOCK]
    pool = Pool(tiny, 60, np.random.default_rng(6))
    (alone,), _ = pool.compute([other], (150,))
    blocks = pool.allocate(150)
    pool.step([(tokens, 0, 150, blocks)])
    own = blocks[:8] + pool.allocate(150 - 8 * BLOCK)
    logits, _ = pool.step([(other, 8 * BLOCK, 150, own), (tokens, 149, 150, blocks)])
    assert np.array_equal(logits, alone[8 * BLOCK :])


def test_real_model_is_exact_over_batches_chunks_and_threads(smollm2: Weights) -> None:
    sequences = random_tokens(smollm2.spec, np.random.default_rng(7), [140, 33, 18, 5])
    torch.set_num_threads(1)
    alone = [Pool(smollm2, 16, np.random.default_rng(8)).compute([tokens], (200,))[0][0] for tokens in sequences]
    last = [len(tokens) - 4 for tokens in sequences]
    pool = Pool(smollm2, 24, np.random.default_rng(9))
    tables = [pool.allocate(len(tokens)) for tokens in sequences]
    for begin, end in ((0, 50), (50, 136)):  # prefill in other chunks, mixed
        torch.set_num_threads(2)
        parts = [(i, begin, min(end, last[i])) for i in (2, 0, 3, 1) if begin < last[i]]
        found = pool.step([(sequences[i], first, stop, tables[i]) for i, first, stop in parts])
        for (i, first, stop), logits in zip(parts, found, strict=True):
            assert np.array_equal(logits, alone[i][first:stop])
    for n in range(4):  # decode together
        torch.set_num_threads(1 + n % 2)
        found = pool.step([(sequences[i], last[i] + n, last[i] + n + 1, tables[i]) for i in range(4)])
        for i, logits in enumerate(found):
            assert np.array_equal(logits, alone[i][last[i] + n : last[i] + n + 1])


def test_pushed_layers_arrive_with_the_checksums_of_their_source(tiny: Weights) -> None:
    tokens = random_tokens(TINY, np.random.default_rng(10), [40])[0]
    pool = Pool(tiny, 8, np.random.default_rng(11))
    blocks = np.array(pool.allocate(40), np.int32)
    targets = [KVMemory(pool.memory.layout) for _ in range(2)]
    places = [np.array([5, 0, 3], np.int32), np.array([1], np.int32)]
    pushes = (Push(targets[0], blocks, places[0]), Push(targets[1], blocks[2:], places[1]))
    everything = np.arange(40, dtype=np.int32)
    table = blocks[None]
    batch = Batch(tokens, everything, np.zeros(40, np.int32), table, np.empty(0, np.int32), (), pushes)
    result = pool.runner.step(batch)
    assert (result.ids, result.logprobs) == ([], [])
    assert result.push_ns > 0
    for push, sums in zip(pushes, result.checksums, strict=True):
        assert sums.shape == (TINY.n_layers, len(push.blocks))
        assert np.array_equal(sums, push.target.checksums(push.target_blocks))
        assert np.array_equal(host_memory(push.target).pages[:, :, push.target_blocks], pool.memory.pages[:, :, push.blocks])


def test_a_pool_of_another_shape_type_or_order_is_refused(tiny: Weights) -> None:
    def layout(n_layers: int = 2, dtype: str = "float32", order: str = "token-major") -> KVLayout:
        return KVLayout(n_layers=n_layers, n_kv_heads=2, head_dim=32, block_tokens=BLOCK, dtype=dtype, n_blocks=1, order=order)

    ReferenceRunner(KVMemory(layout()), tiny)
    for wrong, word in ((layout(n_layers=3), "layers"), (layout(dtype="float16"), "float16"), (layout(order="vnni"), "vnni")):
        with pytest.raises(ModelError, match=word):
            ReferenceRunner(KVMemory(wrong), tiny)
