"""Every architecture: the logits that transformers computed, and the law of exactness."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from relay.model.load import load
from relay.model.weights import Weights
from tests.engine.schedules import Pool, random_tokens
from tests.model import tiny

LENGTHS = [180, 75, 49, 17, 16, 1]  # past a split that the windows of 24 leave behind, and around the edges of tiles and blocks
VARIANTS = list(tiny.variants())


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=tiny.NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def weights(name: str) -> Weights:
    return load(tiny.folder(name))


def logits_of(weights: Weights, tokens: NDArray[np.int32], chunks: tuple[int, ...]) -> NDArray[np.float32]:
    (logits,), _ = Pool(weights, 12, np.random.default_rng(0)).compute([tokens], chunks)
    return logits


def test_there_are_eleven_architectures_here() -> None:
    assert len(tiny.NAMES) == 11


def test_logits_are_those_of_transformers_in_one_chunk_and_in_many(name: str, weights: Weights) -> None:
    right = tiny.expected(name)
    whole = logits_of(weights, right["prompt_ids"], (75,))
    assert np.abs(whole - right["logits"]).max() < 1e-3
    assert np.array_equal(logits_of(weights, right["prompt_ids"], (1, 7, 30)), whole)


def test_greedy_tokens_are_those_of_transformers(name: str, weights: Weights) -> None:
    right = tiny.expected(name)
    tokens = np.concatenate((right["prompt_ids"][:40], np.empty(24, np.int32)))
    pool = Pool(weights, 8, np.random.default_rng(1))
    blocks = pool.allocate(64)
    (logits,) = pool.step([(tokens, 0, 40, blocks)])
    for place in range(40, 64):
        tokens[place] = logits[-1].argmax()
        (logits,) = pool.step([(tokens, place, place + 1, blocks)])
    assert tokens[40:].tolist() == right["greedy"].tolist()


@pytest.mark.parametrize(("variant", "base", "config"), VARIANTS, ids=[name for name, _, _ in VARIANTS])
def test_what_a_config_changes_is_honoured(variant: str, base: str, config: dict[str, Any], tmp_path: Path) -> None:
    weights = load(tiny.changed(base, tmp_path / "model", **config))
    right = tiny.variant_array(variant)
    assert np.abs(logits_of(weights, tiny.expected(base)["prompt_ids"], (75,))[-8:] - right).max() < 1e-3
    assert np.abs(tiny.expected(base)["logits"][-8:] - right).max() > 0.5


def test_logits_and_kv_are_the_same_bits_alone_and_in_any_batch(weights: Weights) -> None:
    """One by one, each alone and on one thread, against mixed chunks, orders, block numbers and thread counts, in pools full of NaN."""
    torch.set_num_threads(1)
    sequences = random_tokens(weights.spec, np.random.default_rng(2), LENGTHS)
    alone = []
    for tokens in sequences:
        pool = Pool(weights, 12, np.random.default_rng(3))
        (logits,), (blocks,) = pool.compute([tokens], (1,))
        assert np.isfinite(logits).all()
        alone.append((logits, pool.written(blocks, len(tokens)).copy()))
    for seed, chunks in enumerate([(1, 2, 3, 5), (16,), (1, 1, 1, 64), (1, 7, 37, 100), (180,)]):
        torch.set_num_threads(1 + seed % 2)
        pool = Pool(weights, 40, np.random.default_rng(seed))
        together, tables = pool.compute(sequences, chunks)
        for tokens, logits, blocks, (right, kv) in zip(sequences, together, tables, alone, strict=True):
            assert np.array_equal(logits, right), f"{len(tokens)} tokens in chunks of {chunks}"
            assert np.array_equal(pool.written(blocks, len(tokens)), kv)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"], indirect=True)
def test_a_rows_experts_do_not_depend_on_its_mates(weights: Weights) -> None:
    """Forty copies of one sequence choose the same experts, which fill several tiles; alone, it shares its experts' tiles with nobody."""
    torch.set_num_threads(2)
    tokens = random_tokens(weights.spec, np.random.default_rng(4), [5])[0]
    alone = logits_of(weights, tokens, (1,))
    pool = Pool(weights, 40, np.random.default_rng(5))
    for logits in pool.step([(tokens, 0, 5, pool.allocate(5)) for _ in range(40)]):
        assert np.array_equal(logits, alone)


@pytest.mark.parametrize("name", ["mixtral"], indirect=True)
def test_equal_scores_choose_the_first_experts(weights: Weights) -> None:
    """A router of zeros: every expert is as good as any."""
    tokens = random_tokens(weights.spec, np.random.default_rng(6), [20])[0]

    def with_experts(n: int) -> Weights:
        layers = tuple(replace(layer, router=torch.zeros(n, weights.spec.hidden), networks=layer.networks[:n]) for layer in weights.layers)
        return replace(weights, spec=msgspec.structs.replace(weights.spec, n_experts=n), layers=layers)

    assert np.array_equal(logits_of(with_experts(4), tokens, (20,)), logits_of(with_experts(2), tokens, (20,)))
