"""Targets: met, not met, not measured."""

from relay.bench.peers.verdict import Verdict, judge_all
from tests.bench.peers.readings import reading


def of(verdicts: list[Verdict], contestant: str, words: str) -> Verdict:
    found = [v for v in verdicts if v.contestant == contestant and words in v.words]
    assert len(found) == 1, found
    return found[0]


def test_a_target_is_met_at_its_limit_and_not_beyond_it() -> None:
    at, beyond = reading("a16", "single", tpot=5.0), reading("a8", "single", tpot=5.01)
    verdicts = judge_all([at, beyond, reading("llama", "single", tpot=10.0)])
    assert (of(verdicts, "a16", "TPOT").ratio, of(verdicts, "a16", "TPOT").met) == (0.5, True)
    assert of(verdicts, "a8", "TPOT").met is False


def test_a_rate_has_to_be_at_least_the_limit() -> None:
    peers = [reading("llama", "sixteen", rate=100.0), reading("vllm", "sixteen", rate=200.0)]
    verdicts = judge_all([reading("a16", "sixteen", rate=430.0), reading("a8", "sixteen", rate=700.0), *peers])
    assert (of(verdicts, "a16", "2.2 times").ratio, of(verdicts, "a16", "2.2 times").met) == (2.15, False)
    assert (of(verdicts, "a8", "3.3 times").peer, of(verdicts, "a8", "3.3 times").met) == ("vllm", True)


def test_the_limits_of_ttft_differ_by_activations() -> None:
    readings = [reading(key, "single", ttft=50.0) for key in ("a16", "a8")]
    verdicts = judge_all([*readings, reading("vllm", "single", ttft=100.0), reading("llama", "single", ttft=300.0)])
    assert (of(verdicts, "a16", "TTFT").limit, of(verdicts, "a16", "TTFT").met) == (0.6, True)
    assert (of(verdicts, "a8", "TTFT").limit, of(verdicts, "a8", "TTFT").met) == (0.4, False)


def test_without_the_peer_nothing_is_claimed() -> None:
    verdict = of(judge_all([reading("a16", "single", tpot=5.0)]), "a16", "TPOT")
    assert (verdict.ratio, verdict.met, verdict.pairs, verdict.peer) == (None, None, 0, "llama")


def test_disaggregated_is_held_against_aggregated_of_the_same_activations() -> None:
    readings = [reading("a16", "sixteen", rate=91.0), reading("a16-aggregated", "sixteen", rate=100.0)]
    readings += [reading("a8", "sixteen", rate=150.0), reading("a8-aggregated", "sixteen", rate=200.0)]
    verdicts = judge_all(readings)
    assert (of(verdicts, "a16", "within").peer, of(verdicts, "a16", "within").met) == ("a16-aggregated", True)
    assert of(verdicts, "a8", "within").met is False
    assert not any(v.contestant == "a16-aggregated" and "within" in v.words for v in verdicts)


def test_the_median_of_the_pairs_decides_and_unquiet_pairs_are_counted() -> None:
    ours = [reading("a16", "competed", i, rate=rate) for i, rate in enumerate((300.0, 100.0, 310.0))]
    theirs = [reading("llama", "competed", i, *(["others"] if i == 1 else []), rate=100.0) for i in range(3)]
    verdict = of(judge_all([*ours, *theirs]), "a16", "busy process")
    assert (verdict.ratio, verdict.met, verdict.pairs, verdict.unquiet) == (3.0, True, 3, 1)
