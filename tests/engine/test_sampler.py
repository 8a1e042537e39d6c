"""The sampler against a plain float64 reading of its definition, and at every edge."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from relay.engine.runner import Draw
from relay.engine.sampler import choose
from relay.messages import Sampling

Floats = NDArray[np.float32]


def draw(
    uniform: float = 0.0, *, tokens: list[int] | None = None, n_prompt: int = 0, suppress: tuple[int, ...] = (), **sampling: Any
) -> Draw:
    return Draw(Sampling(**sampling), uniform, tokens or [], n_prompt, suppress)


def token(logits: Floats, how: Draw) -> int:
    return choose(logits, how)[0]


def random_logits(seed: int, n: int = 5000, spread: float = 3.0) -> Floats:
    return (np.random.default_rng(seed).normal(size=n) * spread).astype(np.float32)


def shares(logits: Floats, n: int = 1000, **sampling: Any) -> NDArray[np.float64]:
    """How often each token is drawn over an even grid of uniforms: its probability to within 1 / n."""
    drawn = [token(logits, draw((i + 0.5) / n, **sampling)) for i in range(n)]
    return np.bincount(drawn, minlength=len(logits)) / n


def expected(logits: Floats, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> NDArray[np.float64]:
    """The definition, by a full sort in float64."""
    p = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    order = np.argsort(-p, kind="stable")
    keep = np.zeros(len(p), bool)
    keep[order[: top_k or len(p)]] = True
    before = np.cumsum(np.where(keep, p, 0)[order]) - np.where(keep, p, 0)[order]
    keep[order] &= before < top_p * p[keep].sum()
    keep[order[0]] = True
    keep &= p >= min_p
    kept = np.where(keep, p, 0)
    return np.asarray(kept / kept.sum())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.3},
        {"temperature": 1.7, "top_k": 40},
        {"top_p": 0.9},
        {"top_p": 0.999, "temperature": 2.0},
        {"top_k": 100, "top_p": 0.5},
        {"min_p": 0.2},
        {"top_k": 50, "top_p": 0.95, "min_p": 0.05, "temperature": 0.8},
        {"top_k": 10_000, "top_p": 0.8},
    ],
)
def test_tokens_are_drawn_with_the_probability_of_the_definition(sampling: dict[str, Any], seed: int) -> None:
    logits = random_logits(seed)
    assert np.abs(np.cumsum(shares(logits, **sampling) - expected(logits, **sampling))).max() < 1 / 500


def test_greedy_takes_the_highest_and_the_lowest_id_among_equals() -> None:
    logits = np.array([1, 5, 5, -2, 5], np.float32)
    assert token(logits, draw(0.99, temperature=0.0)) == 1
    assert token(logits, draw(0.99, temperature=0.0, suppress=(1,))) == 2


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-53])
@pytest.mark.parametrize("sampling", [{"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0}, {"temperature": 1e-40}, {"temperature": 1e-3}])
def test_every_narrowest_setting_is_greedy(sampling: dict[str, Any], uniform: float) -> None:
    logits = random_logits(9)
    assert token(logits, draw(uniform, **sampling)) == logits.argmax()


def test_equal_logits_at_an_edge_keep_the_lower_ids() -> None:
    flat = np.zeros(1000, np.float32)
    assert np.flatnonzero(shares(flat, top_k=7)).tolist() == list(range(7))
    assert np.flatnonzero(shares(flat, top_p=0.3)).tolist() == list(range(300))


def test_the_last_uniform_draws_the_last_token_with_any_weight() -> None:
    logits = np.array([0, 0, 0, -np.inf, -200], np.float32)
    assert token(logits, draw(1 - 2**-53)) == 2
    for n in range(1, 300):
        assert token(np.zeros(n, np.float32), draw(1 - 2**-53)) == n - 1
    assert token(logits, draw(0.0, suppress=(0,))) == 1


def test_a_larger_uniform_never_draws_a_lower_id() -> None:
    drawn = [token(random_logits(4), draw(i / 500, top_p=0.97)) for i in range(500)]
    assert drawn == sorted(drawn)


def test_penalties_count_what_was_seen_and_what_was_generated() -> None:
    logits = np.array([2.0, -2.0, 1.0, 0.5, 0.25], np.float32)
    tokens = [0, 1, 2, 2, 3]  # of which 0 and 1 are the prompt

    def after(bias: dict[int, float], **sampling: Any) -> int:
        return token(logits, draw(tokens=tokens, n_prompt=2, temperature=0.0, logit_bias=tuple(bias.items()), **sampling))

    assert after({}) == 0
    assert after({4: 0.7}, repetition_penalty=2.0) == 0  # 2.0 / 2 = 1.0 is still above 0.95
    assert after({4: 0.8}, repetition_penalty=2.0) == 4
    assert after({1: 4.9}, repetition_penalty=2.0) == 0  # -2 * 2 + 4.9 = 0.9
    assert after({1: 5.1}, repetition_penalty=2.0) == 1
    assert after({2: 2.1}, frequency_penalty=0.5) == 2  # 1 - 2 * 0.5 + 2.1 = 2.1
    assert after({2: 1.9}, frequency_penalty=0.5) == 0  # the prompt's 0 is not counted
    assert after({2: 1.6}, presence_penalty=0.5) == 2  # 1 - 0.5 + 1.6 = 2.1
    assert after({2: 1.4}, presence_penalty=0.5) == 0


def test_bias_and_suppression_act_on_the_draw_alone_and_the_logits_stay_as_they_were() -> None:
    logits = random_logits(5)
    before = logits.copy()
    best, second = np.argsort(-logits)[:2].tolist()
    how = draw(temperature=0.0, suppress=(best,), logit_bias=((7, -100.0),), logprobs=2)
    drawn, logprobs = choose(logits, how)
    assert drawn == second
    assert logprobs is not None
    assert logprobs.top_ids == (best, second)
    assert logprobs.chosen == logprobs.top[1] < logprobs.top[0]
    assert np.array_equal(logits, before)


def test_logprobs_are_of_the_plain_distribution_best_first() -> None:
    logits = random_logits(6)
    wide = logits.astype(np.float64)
    exact = wide - wide.max() - np.log(np.exp(wide - wide.max()).sum())
    drawn, logprobs = choose(logits, draw(0.7, temperature=1.5, logprobs=20))
    assert logprobs is not None
    assert logprobs.chosen == pytest.approx(exact[drawn], abs=1e-6)
    assert logprobs.top_ids == tuple(np.argsort(-exact, kind="stable")[:20].tolist())
    assert logprobs.top == pytest.approx(exact[list(logprobs.top_ids)], abs=1e-6)
    assert choose(logits, draw(0.7))[1] is None
    none = choose(logits, draw(0.7, logprobs=0))[1]
    assert none is not None
    assert none.top == ()


def test_a_target_is_scored_and_nothing_is_drawn() -> None:
    logits = random_logits(7)
    scored, logprobs = choose(logits, Draw(Sampling(), 0.5, [], 0, (), target=123, top=3))
    assert scored == 123
    assert logprobs is not None
    assert len(logprobs.top) == 3
    assert logprobs.chosen < logprobs.top[0]


def test_a_real_vocabulary_with_a_flat_distribution_is_still_cut_exactly() -> None:
    logits = random_logits(8, n=49_152, spread=0.1)  # the nucleus holds tens of thousands
    for uniform in (0.0, 0.25, 0.9999):
        p = expected(logits, top_p=0.9)
        drawn = token(logits, draw(uniform, top_p=0.9))
        assert p[drawn] > 0
        assert abs(p[: drawn + 1].sum() - uniform) < 1e-3
