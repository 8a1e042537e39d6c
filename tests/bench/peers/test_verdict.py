"""Medians of rounds, ratios within rounds; targets met, not met, not measured."""

import pytest

from relay.bench.peers.rounds import Reading
from relay.bench.peers.verdict import Verdict, judge, middle, ratio
from tests.bench.peers.readings import reading


def of(readings: list[Reading], server: str, load: str, figure: str, *, aggregated: bool = False) -> Verdict:
    """The one verdict against a peer, or against our aggregated server."""
    found = [
        v
        for v in judge(readings)
        if (v.server, v.load, v.figure) == (server, load, figure) and v.peer.endswith("-aggregated") == aggregated
    ]
    assert len(found) == 1, found
    return found[0]


def test_ratios_are_formed_within_a_round_so_that_a_slow_minute_counts_for_both() -> None:
    ours = [reading("a16", "single", i, tpot=tpot) for i, tpot in enumerate((4.0, 12.0, 5.0))]
    theirs = [reading("llama", "single", i, tpot=tpot) for i, tpot in ((0, 10.0), (1, 30.0), (3, 1.0))]
    assert ratio([*ours, *theirs], "a16", "llama", "single", "tpot") == (0.4, 2, 0)
    assert ratio(ours, "a16", "llama", "single", "tpot") == (None, 0, 0)
    assert middle(ours, "a16", "single", "tpot") == 5.0


def test_a_round_in_which_all_failed_has_no_figure_and_no_pair() -> None:
    readings = [reading("a16", "single", 0, tpot=5.0), reading("a16", "single", 1), reading("llama", "single", 1, tpot=9.0)]
    assert ratio(readings, "a16", "llama", "single", "tpot") == (None, 0, 0)


@pytest.mark.parametrize(("ours", "met"), [(5.0, True), (5.02, False)])
def test_a_target_is_met_at_its_limit_and_not_beyond_it(ours: float, met: bool) -> None:
    assert of([reading("a8", "single", tpot=ours), reading("llama", "single", tpot=10.0)], "a8", "single", "tpot").met is met


def test_a_rate_has_to_be_at_least_the_limit_times_that_of_the_peer_with_the_better_median() -> None:
    peers = [reading("llama", "sixteen", i, rate=rate) for i, rate in enumerate((100.0, 300.0, 100.0))]
    peers += [reading("vllm", "sixteen", i, rate=200.0) for i in range(3)]
    ours = [reading(key, "sixteen", i, rate=rate) for key, rate in (("a16", 430.0), ("a8", 700.0)) for i in range(3)]
    a16, a8 = (of([*ours, *peers], key, "sixteen", "rate") for key in ("a16", "a8"))
    assert (a16.peer, a16.limit, a16.ratio, a16.met) == ("vllm", 2.2, 2.15, False)
    assert (a8.peer, a8.limit, a8.ratio, a8.met) == ("vllm", 3.3, 3.5, True)


def test_the_better_peer_in_milliseconds_is_the_one_with_fewer() -> None:
    readings = [reading("a16", "single", ttft=50.0), reading("vllm", "single", ttft=100.0), reading("llama", "single", ttft=300.0)]
    assert of(readings, "a16", "single", "ttft").peer == "vllm"


def test_without_the_peer_nothing_is_claimed() -> None:
    verdict = of([reading("a16", "single", tpot=5.0)], "a16", "single", "tpot")
    assert (verdict.ratio, verdict.met, verdict.pairs, verdict.peer) == (None, None, 0, "llama")


def test_disaggregated_is_held_against_aggregated_of_the_same_activations() -> None:
    readings = [reading("a16", "sixteen", rate=91.0), reading("a16-aggregated", "sixteen", rate=100.0)]
    readings += [reading("a8", "sixteen", rate=150.0), reading("a8-aggregated", "sixteen", rate=200.0)]
    assert of(readings, "a16", "sixteen", "rate", aggregated=True).met is True
    assert of(readings, "a8", "sixteen", "rate", aggregated=True).met is False
    assert not [v for v in judge(readings) if v.server == v.peer]


def test_pairs_beside_which_the_machine_was_not_quiet_count_and_are_counted() -> None:
    ours = [reading("a16", "competed", i, rate=rate) for i, rate in enumerate((300.0, 100.0, 310.0))]
    theirs = [reading("llama", "competed", i, others=0.06 if i == 1 else 0.04, rate=100.0) for i in range(3)]
    verdict = of([*ours, *theirs], "a16", "competed", "rate")
    assert (verdict.ratio, verdict.met, verdict.pairs, verdict.unquiet) == (3.0, True, 3, 1)
