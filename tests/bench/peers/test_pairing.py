"""Medians of rounds, ratios within rounds."""

import pytest

from relay.bench.peers.pairing import best_of, by_round, paired_ratios, summarize
from tests.bench.peers.readings import reading


def test_a_summary_has_the_median_of_its_rounds_and_counts_what_was_not_quiet() -> None:
    readings = [
        reading("a16", "single", 0, ttft=100.0, tpot=5.0),
        reading("llama", "single", 0, ttft=300.0, tpot=10.0),
        reading("a16", "single", 1, "others", ttft=140.0, tpot=9.0, failed=2),
        reading("a16", "single", 2, ttft=110.0, tpot=4.0),
    ]
    found = {(s.contestant, s.figure): s for s in summarize(readings)}
    assert list(found) == [("a16", "ttft"), ("a16", "tpot"), ("llama", "ttft"), ("llama", "tpot")]
    ttft = found["a16", "ttft"]
    assert (ttft.values, ttft.middle, ttft.rounds, ttft.unquiet, ttft.failed) == ([100.0, 140.0, 110.0], 110.0, 3, 1, 2)


def test_ratios_are_formed_within_a_round_so_that_a_slow_minute_counts_for_both() -> None:
    ours, theirs = {0: 4.0, 1: 12.0, 2: 5.0}, {0: 10.0, 1: 30.0, 3: 1.0}
    assert paired_ratios(ours, theirs) == pytest.approx([0.4, 0.4])
    assert paired_ratios(ours, {}) == []


def test_a_round_in_which_all_failed_has_no_figure_and_no_pair() -> None:
    readings = [reading("a16", "single", 0, tpot=5.0), reading("a16", "single", 1)]
    assert by_round(readings, "a16", "single", "tpot") == {0: 5.0}


def test_the_better_peer_is_one_peer_in_all_rounds() -> None:
    steady, wild = {0: 100.0, 1: 110.0, 2: 105.0}, {0: 200.0, 1: 20.0, 2: 30.0}
    assert best_of([wild, steady], higher_is_better=True) is steady
    assert best_of([wild, steady], higher_is_better=False) is wild
    assert best_of([{}, {}], higher_is_better=True) == {}
