"""Drawing in C++ against the reference sampler: the same ids, ties and edges included, and the same log probabilities."""

import ctypes
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from relay.engine.native.draws import Draws
from relay.engine.native.token_arrays import TokenArrays
from relay.engine.runner import Draw
from relay.engine.sampler import choose
from relay.kernels.token_sampling import draw_rows
from relay.messages import Logprobs, Sampling

Floats = NDArray[np.float32]
UNIFORMS = (1e-12, 0.1, 0.37, 0.5, 0.77, 0.93, 0.999, 1 - 1e-9)


def drawn(logits: Floats, draws: list[Draw]) -> tuple[list[int], list[Logprobs | None]]:
    before, found = logits.copy(), Draws(draws)
    found.see(TokenArrays())
    draw_rows(logits, found.draws_pointer, found.drawn_pointer)
    assert np.array_equal(logits, before, equal_nan=True)
    return found.ids(), found.logprobs()


def agree(logits: Floats, draws: list[Draw]) -> None:
    """logits: [draws, vocab_size]."""
    ids, logprobs = drawn(logits, draws)
    expected = [choose(row, draw) for row, draw in zip(logits, draws, strict=True)]
    assert ids == [token for token, _ in expected]
    for mine, (_, theirs) in zip(logprobs, expected, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None and theirs is not None:
            assert mine.top_ids == theirs.top_ids
            assert mine.chosen == pytest.approx(theirs.chosen, abs=1e-6)
            assert mine.top == pytest.approx(theirs.top, abs=1e-6)


KINDS: dict[str, Any] = {
    "spread": lambda rng, n: rng.normal(size=n) * 3,
    "peaked": lambda rng, n: rng.normal(size=n) * 0.5 + 12 * (rng.random(n) > 1 - 3 / n),
    "flat": lambda rng, n: rng.normal(size=n) * 0.1,
    "tied": lambda rng, n: rng.integers(-3, 4, n),
    "equal": lambda rng, n: np.zeros(n),
    "half gone": lambda rng, n: np.where(rng.random(n) < 0.5, -np.inf, rng.normal(size=n)),
}
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {},
    {"temperature": 0.3},
    {"temperature": 1e-3},
    {"temperature": 1e-40},
    {"temperature": 5.0},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 40, "temperature": 1.7},
    {"top_k": 512},
    {"top_k": 513},
    {"top_k": 3000, "top_p": 0.7},
    {"top_k": 10**6},
    {"top_p": 0.0},
    {"top_p": 0.3},
    {"top_p": 0.9},
    {"top_p": 0.999, "temperature": 2.0},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"min_p": 0.02, "top_p": 0.95},
    {"top_k": 50, "top_p": 0.95, "temperature": 0.8},
    {"top_k": 50, "top_p": 0.95, "min_p": 0.05, "temperature": 0.8},
)


@pytest.mark.parametrize("n", [1, 5, 63, 64, 65, 1000, 5003])
@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_the_references(kind: str, n: int) -> None:
    rng = np.random.default_rng(n)
    for sampling in SAMPLINGS:
        logits = np.array([KINDS[kind](rng, n) for _ in UNIFORMS], np.float32)
        logits[:, 0] = np.where(np.isneginf(logits).all(-1), 0, logits[:, 0])
        agree(logits, [Draw(Sampling(**sampling), uniform, [], 0) for uniform in UNIFORMS])


def test_the_last_uniform_draws_the_last_token_with_any_weight() -> None:
    last = Draw(Sampling(), 1 - 2**-53, [], 0)
    for n in (1, 63, 64, 65, 300, 5000):
        assert drawn(np.zeros((1, n), np.float32), [last])[0] == [n - 1]
    assert drawn(np.array([[0, 0, 0, -np.inf, -200]], np.float32), [last])[0] == [2]
    assert drawn(np.array([[-np.inf, -200, 0, 0]], np.float32), [Draw(Sampling(), 0.0, [], 0)])[0] == [2]


def test_a_whole_vocabulary_is_cut_and_drawn_as_the_reference_does() -> None:
    rng = np.random.default_rng(0)
    for spread in (0.1, 1.0, 3.0):
        for sampling in SAMPLINGS:
            logits = (rng.normal(size=(3, 49_152)) * spread).astype(np.float32)
            agree(logits, [Draw(Sampling(**sampling), uniform, [], 0) for uniform in rng.random(3)])


@pytest.mark.parametrize("seed", range(60))
def test_penalties_bias_and_suppression_act_as_in_the_reference(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.choice([17, 300, 4096]))

    def some(low: int) -> list[int]:
        return [int(token) for token in rng.integers(0, n, rng.integers(low, 40))]

    draws = []
    for uniform in rng.random(8):
        tokens = some(1) * int(rng.integers(1, 4))
        sampling = Sampling(
            temperature=float(rng.choice([0.0, 0.7, 1.3])),
            top_k=int(rng.choice([0, 5, 50])),
            top_p=float(rng.choice([1.0, 0.9])),
            repetition_penalty=float(rng.choice([1.0, 1.3, 0.8])),
            frequency_penalty=float(rng.choice([0.0, 0.5, -0.3])),
            presence_penalty=float(rng.choice([0.0, 0.7, -1.1])),
            logit_bias=tuple((token, float(rng.normal() * 3)) for token in some(0)) if rng.random() < 0.5 else (),
            logprobs=int(rng.choice([-1, 0, 5])),
        )
        suppress = tuple(some(0)[:5]) if rng.random() < 0.5 else ()
        draws.append(Draw(sampling, float(uniform), tokens, int(rng.integers(0, len(tokens) + 1)), suppress))
    agree((rng.normal(size=(8, n)) * 2).astype(np.float32), draws)


def test_log_probabilities_are_of_the_plain_distribution_whatever_is_drawn() -> None:
    rng = np.random.default_rng(1)
    logits = (rng.normal(size=(6, 2000)) * 4).astype(np.float32)
    tops = (0, 1, 5, 20, 64, 2000)
    agree(logits, [Draw(Sampling(logprobs=top, temperature=0.5), 0.4, [], 0, suppress=(int(logits[0].argmax()),)) for top in tops])
    agree(logits, [Draw(Sampling(), 0.4, [], 0, target=300 * i, top=top) for i, top in enumerate(tops)])
    agree(logits, [Draw(Sampling(), 0.4, [], 0, target=7, top=-1)] * 6)
    tied = np.round(logits)
    agree(tied, [Draw(Sampling(logprobs=top), 0.4, [], 0) for top in tops])


def test_logits_that_are_no_numbers_give_no_token() -> None:
    for n in (1, 100, 5000):
        for value in (np.nan, np.inf, -np.inf):
            logits = np.full((len(SAMPLINGS), n), value, np.float32)
            ids, _ = drawn(logits, [Draw(Sampling(logprobs=2, **sampling), 0.5, [], 0) for sampling in SAMPLINGS])
            assert set(ids) == {-1}


def test_token_arrays_follow_their_lists() -> None:
    arrays = TokenArrays()
    lists = [[1, 2, 3], [4] * 100]
    for _ in range(300):
        for tokens in lists:
            tokens.append(len(tokens))
            found = np.ctypeslib.as_array((ctypes.c_int32 * len(tokens)).from_address(arrays.address(tokens)))
            assert found.tolist() == tokens
        arrays.end_step()
    shorter = lists.pop()
    arrays.address(shorter)
    del shorter[50:]
    found = np.ctypeslib.as_array((ctypes.c_int32 * 50).from_address(arrays.address(shorter)))
    assert found.tolist() == shorter


def test_a_draw_is_the_same_whatever_rows_are_beside_it() -> None:
    rng = np.random.default_rng(2)
    logits = (rng.normal(size=(5, 3000)) * 3).astype(np.float32)
    base = Sampling(temperature=0.9, top_p=0.9, repetition_penalty=1.2)
    draws = [Draw(msgspec.structs.replace(base, top_k=k), 0.6, [1, 2, 3, k], 2) for k in (0, 3, 700, 0, 20)]
    together, _ = drawn(logits, draws)
    assert together == [drawn(logits[i : i + 1], draws[i : i + 1])[0][0] for i in range(5)]
