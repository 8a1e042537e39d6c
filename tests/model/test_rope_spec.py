"""Frequencies of rope against those that transformers computed for real configurations."""

import numpy as np
import pytest
import torch

from relay.model.rope import Rope
from relay.model.rope_spec import Divisors, Linear, Llama3, RopeSpec, Yarn, yarn_magnitude
from tests.model import tiny


def test_llama_3_1_has_the_frequencies_of_transformers() -> None:
    """llama.cpp#8676: with the factors passed over, contexts beyond 8192 go wrong, and nothing says so."""
    spec = RopeSpec(theta=500000.0, scaling=Llama3(factor=8.0, low=1.0, high=4.0, original=8192))
    right = tiny.variant_array("frequencies/llama-3.1-8b")
    assert spec.frequencies(128) == pytest.approx(right, rel=2e-6)
    plain = RopeSpec(theta=500000.0).frequencies(128)
    assert 20 < int((np.abs(spec.frequencies(128) / plain - 1) > 0.01).sum()) < 40
    as_tensor = RopeSpec(theta=500000.0, scaling=Divisors(tuple(plain / right)))
    assert as_tensor.frequencies(128) == pytest.approx(right, rel=2e-6)


def test_yarn_has_the_frequencies_of_transformers() -> None:
    spec = RopeSpec(theta=1e6, scaling=Yarn(factor=4.0, original=32768, beta_fast=32.0, beta_slow=1.0, magnitude=yarn_magnitude(4.0)))
    assert spec.frequencies(128) == pytest.approx(tiny.variant_array("frequencies/qwen2.5-7b-yarn"), rel=2e-6)
    assert spec.magnitude == pytest.approx(1.138629436111989)
    assert yarn_magnitude(1.0) == 1.0


def test_tables_are_cosines_and_sines_at_far_positions() -> None:
    spec = RopeSpec(theta=10000.0, scaling=Linear(2.0))
    position = 20000
    cos, signed = Rope(spec, 8, 20001).turn(torch.tensor([position]))
    angles = position / 2.0 * 10000.0 ** (-np.arange(4) / 4)
    assert cos[:, 0].numpy() == pytest.approx(np.cos(angles), abs=1e-7)
    assert signed[1, :, 0].numpy() == pytest.approx(np.sin(angles), abs=1e-7)
    assert signed[0, :, 0].numpy() == pytest.approx(-np.sin(angles), abs=1e-7)
