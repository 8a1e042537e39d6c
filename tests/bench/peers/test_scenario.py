"""Loads and what is read of them."""

import pytest

from relay.bench.peers.scenario import SCENARIOS, seed_of

REPORT = {"ttft_ms": {"p50": 400.0}, "tpot_ms": {"p50": 5.0}, "output_tokens_per_s": 150.0}
FAILED = {"ttft_ms": None, "tpot_ms": None, "output_tokens_per_s": 0.0}


def test_figures_are_read_from_a_report() -> None:
    found = {(s.key, f.key): f.read(REPORT) for s in SCENARIOS for f in s.figures}
    assert found == {
        ("single", "ttft"): 400.0,
        ("single", "tpot"): 5.0,
        ("four", "rate"): 150.0,
        ("sixteen", "rate"): 150.0,
        ("prefill", "rate"): pytest.approx(5000.0),
        ("competed", "rate"): pytest.approx(200.0),
    }


def test_a_run_in_which_all_failed_has_no_figures() -> None:
    assert all(figure.read(FAILED) is None for scenario in SCENARIOS for figure in scenario.figures)


def test_no_two_runs_on_one_server_get_the_same_prompts() -> None:
    seeds = [seed_of(number, scenario) for number in range(50) for scenario in SCENARIOS]
    assert len(set(seeds)) == len(seeds)


def test_the_arguments_are_those_of_relay_bench() -> None:
    single, *_ = SCENARIOS
    words = single.arguments(seed=7, quick=True)
    assert words[:4] == ["--concurrency", "1", "--requests", "3"]
    assert words[-6:] == ["--prompt-tokens", "105", "--output-tokens", "64", "--sampling", "greedy"]
