"""The arithmetic of a report, and its keys."""

import json
import re
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from relay.bench import report as report_module
from relay.bench.meter import Generator
from relay.bench.report import Context, Measured, Report, measure
from relay.bench.schedule import Clipped
from relay.bench.slo import Slo
from relay.bench.table import show
from tests.bench.records import record

GENERATOR = Generator(
    saturated=False,
    reason="",
    cpu_share=0.1,
    cpu_us_per_token=10.0,
    lag_p50_ms=0.1,
    lag_p99_ms=0.2,
    lag_max_ms=0.3,
    waited_for_core_share=0.0,
)
CONTEXT = Context(
    tool="relay bench",
    date="2026-01-01T00:00:00+00:00",
    url="http://x",
    model="m",
    endpoint="completions",
    mode={"mode": "closed", "concurrency": 2, "requests": 4},
    workload={"seed": 0},
    clipped=Clipped(requests=1, prompt_tokens=7, output_tokens=0),
    notes=["a note"],
)
RECORDS = [
    record(start_s=0.0, index=0, prompt_tokens=10, completion_tokens=5, cached_tokens=8),
    record(start_s=1.0, index=1, chunks=(3.0, 3.5, 4.0), end_s=4.0, prompt_tokens=10, completion_tokens=3, cached_tokens=0),
    record(start_s=2.0, index=2, chunks=(1.0, 5.0), end_s=6.0, failure="cut", message="gone"),
    record(start_s=2.0, index=3, chunks=(), end_s=0.1, failure="http_503", message="full"),
]


def measured(records: list[Any] | None = None, slo: Slo | None = None, **fields: Any) -> Measured:
    values: dict[str, Any] = {"slo": slo, "generator": GENERATOR, "interrupted": False, "unfinished": 0, **fields}
    return measure(RECORDS if records is None else records, **values)


def test_figures_are_of_ok_requests_over_the_whole_time() -> None:
    found = measured()
    assert found.duration_s == 8.0  # from the first start to the end of the third, which failed
    assert (found.requests.sent, found.requests.ok, found.requests.failed) == (4, 2, 2)
    assert found.requests.failures == {"cut": 1, "http_503": 1}
    assert found.messages == {"cut": "gone", "http_503": "full"}
    assert (found.output_tokens, found.prompt_tokens, found.chunks) == (8, 20, 6)
    assert (found.output_tokens_per_s, found.prompt_tokens_per_s, found.requests_per_s) == (1.0, 2.5, 0.25)
    assert found.ttft_ms is not None
    assert (found.ttft_ms.n, found.ttft_ms.mean) == (2, 2000.0)
    assert found.itl_ms is not None
    assert (found.itl_ms.n, found.itl_ms.max) == (4, 500.0)
    assert found.tpot_ms is not None
    assert found.tpot_ms.mean == pytest.approx((250 + 500) / 2)  # by usage: 4 steps in 1 s, 2 in 1 s
    assert (found.cached_prompt_tokens, found.cached_share) == (8, 0.4)


def test_goodput_has_failures_in_the_denominator() -> None:
    found = measured(slo=Slo(ttft_s=2.0)).slo
    assert found is not None
    assert (found.requests_share, found.requests_per_s, found.output_tokens_per_s) == (0.25, 0.125, 0.625)


def test_short_answers_and_answers_without_text_are_counted() -> None:
    found = measured([record(asked_output_tokens=9), record(chunks=(), completion_tokens=2, asked_output_tokens=2)])
    assert (found.requests.short, found.requests.without_text) == (1, 1)


def test_without_usage_chunks_are_tokens_and_nothing_is_said_of_caches() -> None:
    found = measured([record()])
    assert (found.output_tokens, found.prompt_tokens) == (3, 10)
    assert (found.cached_prompt_tokens, found.cached_share) == (None, None)


def test_nothing_sent_is_a_report_too() -> None:
    found = measured([], interrupted=True, unfinished=3)
    assert (found.requests.sent, found.ttft_ms, found.output_tokens_per_s, found.duration_s) == (0, None, 0.0, 0.0)


def test_every_key_of_the_json_is_documented() -> None:
    body = json.loads(Report(CONTEXT, measured(slo=Slo(ttft_s=2.0))).to_json())
    assert report_module.__doc__ is not None
    table = "\n".join(line.split("|")[1] for line in report_module.__doc__.splitlines() if line.startswith("| `"))
    assert set(body) == set(re.findall(r"`(\w+)`", table))
    assert body["schema"] == 1


def test_the_table_tells_failures_clipping_notes_and_saturation() -> None:
    console = Console(width=200, record=True, file=StringIO())
    late = Generator(
        saturated=True,
        reason="its loop was 50 ms late at p99",
        cpu_share=0.5,
        cpu_us_per_token=None,
        lag_p50_ms=1.0,
        lag_p99_ms=50.0,
        lag_max_ms=60.0,
        waited_for_core_share=None,
    )
    show(Report(CONTEXT, measured(slo=Slo(ttft_s=2.0), generator=late, interrupted=True, unfinished=2)), console)
    text = console.export_text()
    for words in (
        "2 ok, 2 failed",
        "1 x cut: gone",
        "1 x http_503: full",
        "1 requests by 7 prompt and 0 output tokens",
        "a note",
        "50 ms late",
        "2 unfinished",
        "25.0% of requests within TTFT 2000 ms",
        "40.0% of them cached",
    ):
        assert words in text, text
    assert re.search(r"TTFT +│ +2000.00 │", text), text
