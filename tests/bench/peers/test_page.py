"""The page and the picture."""

from pathlib import Path

from relay.bench.peers.page import draw, markdown
from tests.bench.peers.readings import reading, record

READINGS = [
    reading("a16", "single", 0, ttft=90.0, tpot=4.5),
    reading("llama", "single", 0, ttft=330.0, tpot=9.0),
    reading("a16", "single", 1, ttft=96.0, tpot=4.7, others=0.09),
    reading("llama", "single", 1, ttft=350.0, tpot=9.4, failed=1),
]


def test_the_page_has_figures_ratios_targets_and_who_was_absent() -> None:
    page = markdown(record(READINGS))
    assert "| Ours | 93.0 | 4.6 | - | - | - | - | - |" in page
    assert "| llama.cpp | 340 (1 failed or short) | 9.2 (1 failed or short) | - | - | - | - | - |" in page
    assert "| a16 / llama | 0.27 | 0.50 | - | - | - | - | - |" in page
    assert "| `a16` | `llama` | 1 stream: TPOT, ms | 0.50 | at most 0.5 | met | 2 | 1 |" in page
    assert "| `a16` | `llama` | 2000-token prompt: prompt tokens/s | - | at least 3.5 | not measured | 0 | 0 |" in page
    assert "- vllm took no part: it does not start here" in page


def test_the_page_says_when_it_was_not_quiet_and_how_to_repeat_it() -> None:
    page = markdown(record(READINGS))
    assert "in 1 of 4 runs others" in page
    assert "| 2 | single | `a16` | 1.5 | 9.0% | 0.0% | 12.0 |" in page
    assert "serve llama\n" in page
    assert page.count("--concurrency 1  # 1 stream\n") == 1
    assert "not quiet\n" not in markdown(record(READINGS[:2]))
    assert "| met, never quiet | 1 | 1 |" in markdown(record([reading("a16", "single", tpot=1.0, others=0.2), READINGS[1]]))


def test_a_picture_is_drawn_though_not_all_was_measured(tmp_path: Path) -> None:
    draw(record(READINGS), tmp_path / "some.png")
    assert (tmp_path / "some.png").read_bytes().startswith(b"\x89PNG")
