"""Drawing on the device against the sampler that defines it: the same ids, ties and edges included, and the same log probabilities."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from relay.engine.keyed_random import uniform
from relay.engine.runner import Draw
from relay.engine.sampler import choose
from relay.kernels.emulator.compiler import Mode
from relay.kernels.emulator.device import EmulatedDevice
from relay.kernels.sample_tokens import MOST_TOP, PROGRAMS, ROW, Drawn, DrawRow, drawn, pack, reference, sample_tokens, tally_tokens
from relay.messages import Sampling
from tests.kernels.paged import same_bits

PLAIN = EmulatedDevice(PROGRAMS)
CPU = torch.device("cpu")


def logits_of(n_rows: int, vocab_size: int, seed: int = 0, spread: float = 3.0) -> Tensor:
    return torch.randn(n_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread


def run(
    logits: Tensor,
    draws: Sequence[DrawRow],
    *,
    on: EmulatedDevice = PLAIN,
    tallies: Tensor | None = None,
    masks: Tensor | None = None,
) -> Drawn:
    to = drawn(len(draws), logits.shape[1], CPU)
    packed, before = pack(draws), logits.clone()
    parts = (torch.from_numpy(packed.rows), torch.from_numpy(packed.bias_ids), torch.from_numpy(packed.biases))
    sample_tokens(logits, *parts, to, tallies=tallies, masks=masks, on=on)
    assert same_bits(logits, before)
    return to


def int32(values: Sequence[int] | NDArray[np.int64]) -> Tensor:
    return torch.tensor(np.array(values, np.int32))


def tallies_of(histories: Sequence[tuple[list[int], int]], vocab_size: int, on: EmulatedDevice = PLAIN) -> Tensor:
    """(tokens, n_prompt) of each sequence."""
    tallies = torch.full((len(histories), vocab_size), 99, dtype=torch.int32)
    begins = np.cumsum([0, *(len(tokens) for tokens, _ in histories)])
    tokens, n_prompt = [t for tokens, _ in histories for t in tokens], [n for _, n in histories]
    slots = torch.arange(len(histories)).int()
    tally_tokens(int32(tokens), int32(begins), int32(n_prompt), slots, tallies, on=on)
    return tallies


def defined(logits: Tensor, row: DrawRow, tokens: list[int], n_prompt: int) -> tuple[int, Any]:
    s = row.sampling
    draw = Draw(s, uniform(s.seed, s.choice, row.position), tokens, n_prompt, suppress=row.suppress, target=row.target, top=row.top)
    return choose(logits.numpy(), draw)


SETTINGS = {
    "greedy": Sampling(temperature=0.0),
    "plain": Sampling(),
    "hot": Sampling(temperature=3.5),
    "cold": Sampling(temperature=0.05),
    "coldest": Sampling(temperature=1e-38),
    "top_k": Sampling(top_k=7),
    "top_1": Sampling(top_k=1),
    "top_k_all": Sampling(top_k=5000),
    "top_p": Sampling(top_p=0.8),
    "tiny_top_p": Sampling(top_p=1e-9),
    "no_top_p": Sampling(top_p=0.0),
    "wide_top_p": Sampling(top_p=0.9999),
    "min_p": Sampling(min_p=0.1),
    "min_p_1": Sampling(min_p=1.0),
    "all_cuts": Sampling(temperature=1.3, top_k=40, top_p=0.9, min_p=0.02),
    "repetition": Sampling(repetition_penalty=1.7),
    "presence": Sampling(frequency_penalty=0.6, presence_penalty=-0.4, top_p=0.95),
    "bias": Sampling(logit_bias=((3, 9.0), (5, -100.0), (3, 2.0)), temperature=0.7),
    "negative_keys": Sampling(seed=-5, choice=2),
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("vocab_size", [1, 33, 1000, 3001])
def test_ids_are_the_definitions(name: str, vocab_size: int) -> None:
    logits = logits_of(12, vocab_size, vocab_size)
    sampling = SETTINGS[name]
    if vocab_size < 10:
        sampling = msgspec.structs.replace(sampling, logit_bias=())
    rng = np.random.default_rng(1)
    histories = [(rng.integers(0, vocab_size, 40).tolist(), 15) for _ in range(12)]
    rows = [DrawRow(msgspec.structs.replace(sampling, seed=sampling.seed + i), position=100 + i, tally=i) for i in range(12)]
    got = run(logits, rows, tallies=tallies_of(histories, vocab_size))
    for i, row in enumerate(rows):
        assert got.ids[i] == defined(logits[i], row, *histories[i])[0], i


def test_the_reference_draws_what_is_defined() -> None:
    logits = logits_of(len(SETTINGS), 300)
    tokens = list(range(40)) * 2
    tally = tallies_of([(tokens, 30)], 300)[0]
    for i, sampling in enumerate(SETTINGS.values()):
        row = DrawRow(sampling, position=i)
        assert reference(logits[i], row, tally=tally)[0] == defined(logits[i], row, tokens, 30)[0], sampling


@pytest.mark.parametrize("sampling", [Sampling(top_k=5), Sampling(top_p=0.3), Sampling(top_k=20, top_p=0.5), Sampling(temperature=0.0)])
def test_among_equals_lower_ids_stay(sampling: Sampling) -> None:
    logits = torch.zeros(16, 70)
    logits[:, 3] = -1.0
    logits[:, 60:] = 1.0
    rows = [DrawRow(sampling, position=i) for i in range(16)]
    got = run(logits, rows)
    for i, row in enumerate(rows):
        assert got.ids[i] == defined(logits[i], row, [0], 1)[0], i


def test_drawn_tokens_follow_the_weights() -> None:
    n = 600
    logits = torch.log(torch.tensor([0.5, 0.25, 0.125, 0.125])).expand(n, 4).contiguous()
    got = run(logits, [DrawRow(Sampling(seed=9), position=i) for i in range(n)])
    counts = torch.bincount(got.ids, minlength=4) / n
    assert torch.allclose(counts, torch.tensor([0.5, 0.25, 0.125, 0.125]), atol=0.06)


@pytest.mark.parametrize("n_top", [0, 1, 5, MOST_TOP])
@pytest.mark.parametrize("vocab_size", [3, 40, 2000])
def test_log_probabilities_are_the_definitions(n_top: int, vocab_size: int) -> None:
    logits = logits_of(3, vocab_size, 5)
    logits[2] = logits[2].round()  # equals
    rows = [DrawRow(Sampling(logprobs=n_top, seed=i, temperature=0.8), position=i) for i in range(2)]
    rows.append(DrawRow(Sampling(), position=0, target=1, top=n_top))
    got = run(logits, rows)
    for i, row in enumerate(rows):
        token, want = defined(logits[i], row, [0], 1)
        assert got.ids[i] == token
        assert got.logprobs[i].item() == pytest.approx(want.chosen, abs=1e-6)
        n = len(want.top_ids)
        assert got.top_ids[i, :n].tolist() == list(want.top_ids)
        assert got.top[i, :n].tolist() == pytest.approx(want.top, abs=1e-6)
        assert reference(logits[i], row)[1][token].item() == pytest.approx(want.chosen, abs=1e-6)


def test_a_grammar_mask_forbids() -> None:
    logits = logits_of(4, 100)
    allowed = torch.zeros(2, 100, dtype=torch.bool)
    allowed[0, [5, 64, 99]] = True
    words = np.packbits(np.pad(allowed.numpy(), ((0, 0), (0, 28))), axis=1, bitorder="little").view(np.int32)
    masks = torch.from_numpy(words)
    rows = [DrawRow(Sampling(seed=i), position=i, mask=0) for i in range(3)] + [DrawRow(Sampling(), position=0, mask=1)]
    got = run(logits, rows, masks=masks)
    for i in range(3):
        assert got.ids[i] == reference(logits[i], rows[i], mask=allowed[0])[0]
        assert got.ids[i] in (5, 64, 99)
    assert got.ids[3] == -1  # nothing is allowed


def test_suppressed_ids_are_not_drawn_and_biased_ones_are() -> None:
    logits = logits_of(2, 50)
    best = int(logits[0].argmax())
    rows = [DrawRow(Sampling(temperature=0.0, logit_bias=((best, 5.0),)), position=0, suppress=(best,))]
    rows.append(DrawRow(Sampling(logit_bias=((7, 100.0),)), position=0))
    assert run(logits, rows).ids.tolist() == [defined(logits[0], rows[0], [0], 1)[0], 7]


def test_drawn_tokens_are_counted_and_scored_ones_are_not() -> None:
    logits = logits_of(3, 60)
    tallies = tallies_of([([4, 4, 8, 4], 2), ([1], 1), ([], 0)], 60)
    assert tallies[0, [4, 8]].tolist() == [1 + 2, 2]
    before = tallies.clone()
    rows = [
        DrawRow(Sampling(temperature=0.0), 0, tally=1),
        DrawRow(Sampling(temperature=0.0), 0),
        DrawRow(Sampling(), 0, tally=0, target=3),
    ]
    got = run(logits, rows, tallies=tallies)
    before[1, int(got.ids[0])] += 2
    assert torch.equal(tallies, before)


def test_a_row_depends_neither_on_the_batch_nor_on_the_order_of_threads() -> None:
    logits = logits_of(5, 900)
    rows = [DrawRow(replace_seed(SETTINGS["all_cuts"], i), position=i, top=-1) for i in range(5)]
    rows = [replace(row, sampling=msgspec.structs.replace(row.sampling, logprobs=5)) for row in rows]
    together = run(logits, rows)
    for seed in (1, 2):
        shuffled = run(logits, rows, on=EmulatedDevice(PROGRAMS, seed=seed))
        assert all(same_bits(getattr(shuffled, name), getattr(together, name)) for name in ("ids", "logprobs"))
        assert same_bits(shuffled.top[:, :5], together.top[:, :5])
    for i in range(5):
        alone = run(logits[i : i + 1].clone(), [rows[i]])
        assert alone.ids[0] == together.ids[i]
        assert same_bits(alone.logprobs, together.logprobs[i : i + 1])
        assert same_bits(alone.top[:, :5], together.top[i : i + 1, :5])


def replace_seed(sampling: Sampling, seed: int) -> Sampling:
    return msgspec.structs.replace(sampling, seed=seed)


@pytest.mark.parametrize("mode", ["address", "thread"])
def test_sanitizers_find_nothing(mode: Mode) -> None:
    device = EmulatedDevice(PROGRAMS, mode)
    logits = logits_of(2, 700)
    logits[1] = logits[1].round()
    rows = [DrawRow(msgspec.structs.replace(SETTINGS["all_cuts"], logprobs=3, repetition_penalty=1.2), 0, tally=0, suppress=(3, 4))]
    rows.append(DrawRow(Sampling(top_k=9), 2))
    histories = [([4, 4, 8, 4, 650], 2)]
    tallies, watched = tallies_of(histories, 700), tallies_of(histories, 700, device)
    assert torch.equal(tallies, watched)
    assert torch.equal(run(logits, rows, on=device, tallies=watched).ids, run(logits, rows, tallies=tallies).ids)
    assert torch.equal(tallies, watched)


def test_what_does_not_fit_is_refused() -> None:
    logits = logits_of(1, 40)
    with pytest.raises(ValueError, match="33 alternatives"):
        run(logits, [DrawRow(Sampling(logprobs=33), 0)])
    with pytest.raises(ValueError, match=r"tallies has shape \[1, 41\]"):
        run(logits, [DrawRow(Sampling(), 0)], tallies=torch.zeros(1, 41, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"masks has shape \[1, 40\]; expected \[any, 2\]"):
        run(logits, [DrawRow(Sampling(), 0)], masks=torch.zeros(1, 40, dtype=torch.int32))
    with pytest.raises(ValueError, match=f"rows has shape .*{ROW.itemsize}"):
        run(logits_of(2, 40), [DrawRow(Sampling(), 0)])
