"""Limits: how they are read, and who meets them."""

import pytest

from relay.bench.slo import Slo, parse_slo
from tests.bench.records import record


def test_limits_are_read_with_their_units() -> None:
    assert parse_slo("ttft=500ms,tpot=0.05s") == Slo(ttft_s=0.5, tpot_s=0.05)
    assert parse_slo("e2e=10s, ttft=1.5s") == Slo(e2e_s=10.0, ttft_s=1.5)


@pytest.mark.parametrize("text", ["", "ttft", "ttft=5", "ttft=-1s", "latency=5ms", "ttft=1s,ttft=2s", "ttft=1s,"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no limit"):
        parse_slo(text)


def test_every_limit_counts_and_a_value_at_the_limit_meets_it() -> None:
    one = record(start_s=0.0)  # TTFT 1, TPOT 0.5, E2E 2.25
    assert Slo(ttft_s=1.0, tpot_s=0.5, e2e_s=2.25).met_by(one)
    assert not Slo(ttft_s=0.99).met_by(one)
    assert not Slo(tpot_s=0.49).met_by(one)
    assert not Slo(e2e_s=2.24).met_by(one)


def test_a_failed_request_and_one_without_text_meet_nothing() -> None:
    assert not Slo().met_by(record(failure="cut"))
    assert not Slo(ttft_s=100.0).met_by(record(chunks=()))
    assert Slo(tpot_s=0.001).met_by(record(chunks=(1.0,))), "one token has no TPOT"
