"""Ledgers into means for each span and token."""

import pytest

from relay.bench.peers.whereabouts import gather

LEDGER = {
    "completion_tokens": 5,
    "ttft_ns": 60_000_000,
    "spans": {"prefill.floor": 50_000_000, "hop": 12_000_000, "decode.floor": 16_000_000, "unaccounted": 0},
    "ttft_spans": {"prefill.floor": 50_000_000, "hop": 10_000_000, "unaccounted": 0},
}


def test_spans_before_the_first_token_and_for_each_one_after_it() -> None:
    found = gather("a16", "single", [LEDGER, LEDGER], [{"decode-0": 0.02}, {"decode-0": 0.02, "gateway-0": 0.01}], 10)
    assert found is not None
    assert found.first_token_ms == {"prefill.floor": 50.0, "hop": 10.0}
    assert found.each_token_us == {"decode.floor": 4000.0, "hop": 500.0}
    assert found.cpu_us_per_token == {"decode-0": pytest.approx(4000.0), "gateway-0": pytest.approx(1000.0)}


def test_an_answer_that_never_began_is_not_counted() -> None:
    assert gather("a16", "single", [{**LEDGER, "ttft_ns": None}], [], 0) is None


def test_answers_of_one_token_have_no_later_ones() -> None:
    found = gather("a16", "prefill", [{**LEDGER, "completion_tokens": 1}], [], 1)
    assert found is not None
    assert found.each_token_us == {}
