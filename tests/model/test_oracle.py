"""The real model against what transformers computed with the same weights in float32 (tests/data/README.md)."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relay.engine.reference_runner import ReferenceRunner
from relay.engine.runner import Batch, Draw
from relay.kv.layout import KVLayout
from relay.kv.memory import KVMemory
from relay.messages import Logprobs, Sampling
from relay.model.gguf_metadata import read_metadata
from relay.model.load import load
from relay.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def runner(smollm2_path: Path) -> ReferenceRunner:
    weights = load(smollm2_path)
    spec = weights.spec
    layout = KVLayout(
        n_layers=spec.n_layers, n_kv_heads=spec.n_kv_heads, head_dim=spec.head_dim, block_tokens=16, dtype="float32", n_blocks=20
    )
    return ReferenceRunner(KVMemory(layout), weights)


def scored(runner: ReferenceRunner, ids: list[int], first: int) -> list[Logprobs]:
    """Teacher forced: the log probability of each of ids[first:], with the two most likely tokens."""
    n = len(ids) - 1
    rows = range(first - 1, n)
    everything = np.arange(n, dtype=np.int32)
    table = np.arange(runner.layout.blocks_for(n), dtype=np.int32)[None]
    draws = tuple(Draw(Sampling(), 0.0, ids, first, target=ids[row + 1], top=2) for row in rows)
    batch = Batch(np.array(ids[:-1], np.int32), everything, np.zeros(n, np.int32), table, np.array(rows, np.int32), draws)
    return [found for found in runner.step(batch).logprobs if found is not None]


def test_greedy_tokens_and_their_logprobs_are_the_oracles(runner: ReferenceRunner, smollm2_oracle: dict[str, Any]) -> None:
    n_clear = 0
    for answer in smollm2_oracle["greedy"]:
        found = scored(runner, answer["prompt_ids"] + answer["greedy_ids"], len(answer["prompt_ids"]))
        assert [logprobs.chosen for logprobs in found] == pytest.approx(answer["logprobs"], abs=2e-4)
        for logprobs, token, margin in zip(found, answer["greedy_ids"], answer["margin"], strict=True):
            if margin >= 0.1:
                n_clear += 1
                assert logprobs.top_ids[0] == token
                assert logprobs.top[0] - logprobs.top[1] == pytest.approx(margin, abs=2e-3)
    assert n_clear == 606


def test_likelihood_of_a_text_is_the_oracles(runner: ReferenceRunner, smollm2_oracle: dict[str, Any], smollm2_path: Path) -> None:
    licence = smollm2_oracle["license_text_nll"]
    ids = Tokenizer.from_gguf(read_metadata(smollm2_path).metadata).encode(licence["text"])
    assert len(ids) == licence["n_tokens"]
    nll = -np.mean([logprobs.chosen for logprobs in scored(runner, ids, 1)])
    assert nll == pytest.approx(licence["nll"], abs=2e-5)
