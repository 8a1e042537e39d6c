"""Sampling fields reach the engine as they were sent."""

import json
from typing import Any

import pytest

from relay.messages import Sampling
from relay.openai.completion import parse_completion
from relay.openai.options import Options


def options(**fields: Any) -> Options:
    return parse_completion(json.dumps({"prompt": "hi"} | fields).encode()).options


def test_every_field_reaches_the_template() -> None:
    """vllm#2754 (top_k was ignored), vllm#15241 (temperature was ignored)."""
    assert options(
        temperature=10,
        top_p=0.5,
        top_k=1,
        min_p=0.1,
        repetition_penalty=1.3,
        frequency_penalty=-2,
        presence_penalty=2,
        logit_bias={"7": -100, "3": 0.5},
        logprobs=20,
        seed=5,
    ).sampling == Sampling(
        temperature=10.0,
        top_p=0.5,
        top_k=1,
        min_p=0.1,
        repetition_penalty=1.3,
        frequency_penalty=-2.0,
        presence_penalty=2.0,
        logit_bias=((3, 0.5), (7, -100.0)),
        logprobs=20,
    )


@pytest.mark.parametrize("off", [-1, 0])
def test_top_k_has_two_ways_to_be_off(off: int) -> None:
    assert options(top_k=off).sampling.top_k == 0


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63)])
def test_any_64_bit_seed_is_taken_and_none_is_left_to_the_gateway(seed: int) -> None:
    assert options(seed=seed).seed == seed
    assert options().seed is None


def test_the_ends_of_the_ranges_are_inside() -> None:
    assert options(temperature=0, top_p=1, min_p=1, repetition_penalty=10, logprobs=0).sampling.logprobs == 0
    assert options(temperature=100, top_p=1e-6, min_p=0, repetition_penalty=0.01).sampling.temperature == 100.0
    assert options(logit_bias={}).sampling.logit_bias == ()
    likeliest = options(top_p=0, top_k=5).sampling
    assert (likeliest.top_p, likeliest.top_k) == (1.0, 1)
    assert options(top_k=7.0, seed=3.0).sampling.top_k == 7
