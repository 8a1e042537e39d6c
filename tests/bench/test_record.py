"""The latencies of one request, by their definitions."""

import json

import pytest

from tests.bench.records import record


def test_latencies_count_from_the_intended_start() -> None:
    late = record(start_s=5.0, sent_s=5.8)
    assert late.ttft_s == pytest.approx(1.0)
    assert late.e2e_s == pytest.approx(2.25)
    assert late.itl_s() == pytest.approx([0.5, 0.5])


def test_tpot_goes_by_usage_where_chunks_hold_several_tokens() -> None:
    assert record().tpot_s == pytest.approx(0.5)
    assert record(completion_tokens=11).tpot_s == pytest.approx(0.1)
    assert record(completion_tokens=11).itl_s() == pytest.approx([0.5, 0.5])


def test_an_answer_of_one_token_has_no_tpot_and_one_without_text_no_ttft() -> None:
    assert record(chunks=(1.0,)).tpot_s is None
    nothing = record(chunks=(), completion_tokens=3)
    assert (nothing.ttft_s, nothing.tpot_s, nothing.tokens) == (None, None, 3)


def test_a_line_of_json_has_milliseconds_after_the_start() -> None:
    line = json.loads(record(start_s=5.0, sent_s=5.25, failure="cut", message="gone").to_json())
    assert (line["start_s"], line["send_lag_ms"], line["ttft_ms"], line["e2e_ms"]) == (5.0, 250.0, 1000.0, 2250.0)
    assert line["chunk_ms"] == [1000.0, 1500.0, 2000.0]
    assert (line["ok"], line["failure"], line["message"]) == (False, "cut", "gone")
