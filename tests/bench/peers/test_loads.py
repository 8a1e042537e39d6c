"""Loads, what is read of them, and the servers of ours that get them."""

from pathlib import Path

import pytest

from relay.bench.peers.loads import LOADS, Report, seed_of
from relay.bench.peers.ours import CONFIGS, server
from relay.bench.peers.rounds import parse_stat
from relay.config import load
from tests.running import ROOT

REPORT: Report = {
    "ttft_ms": {"p50": 400.0},
    "tpot_ms": {"p50": 5.0},
    "output_tokens_per_s": 150.0,
    "prompt_tokens": 6000,
    "requests": {"ok": 3},
}
FAILED: Report = {"ttft_ms": None, "tpot_ms": None, "output_tokens_per_s": 0.0, "prompt_tokens": 0, "requests": {"ok": 0}}


def test_figures_are_read_from_a_report() -> None:
    found = {f"{load.key}.{figure.key}": figure.read(REPORT) for load in LOADS for figure in load.figures}
    assert found == {
        "single.ttft": 400.0,
        "single.tpot": 5.0,
        "four.rate": 150.0,
        "sixteen.rate": 150.0,
        "prefill.prefill": pytest.approx(5000.0),
        "competed.rate": 150.0,
        "competed.tpot": 5.0,
    }


def test_a_run_in_which_all_failed_has_no_figures() -> None:
    assert all(figure.read(FAILED) is None for load in LOADS for figure in load.figures)


def test_no_server_gets_the_same_prompts_twice() -> None:
    seeds = [seed_of(number, load) for number in range(50) for load in LOADS]
    assert len({*seeds, 0}) == len(seeds) + 1  # 0 is the warm-up's


def test_busy_time_leaves_idle_and_steal_out_and_counts_guests_once() -> None:
    busy_s, steal_s = parse_stat("cpu  1000 20 300 50000 40 6 7 80 5 0\ncpu0 1 1 1 1 1 1 1 1 0 0\n")
    assert steal_s > 0
    assert busy_s / steal_s == pytest.approx((1000 + 20 + 300 + 6 + 7) / 80)


@pytest.mark.parametrize("key", CONFIGS)
def test_each_of_ours_is_a_config_with_its_activations_and_threads(key: str, tmp_path: Path) -> None:
    found = server(key, ROOT / "configs", tmp_path, threads=1, port=1234)
    config = load(tmp_path / f"{key}.yaml")
    assert config.engine.activations == key.partition("-")[0]
    assert [worker.threads for worker in config.workers] == [1] * (1 if key.endswith(("aggregated", "plain")) else 2)
    assert (config.engine.speculative_tokens == 0) == key.endswith("plain")
    assert found.command[-1] == "127.0.0.1:1234"
