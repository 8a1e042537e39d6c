"""Public traces: real rows, and rows that are wrong."""

from pathlib import Path

import pytest

from relay.bench.trace import Row, read_trace
from relay.errors import StartError

DATA = Path(__file__).parent.parent / "data"


def test_mooncake_rows_count_from_the_first() -> None:
    rows = read_trace(DATA / "mooncake_trace.jsonl")
    assert rows[0] == Row(at_s=0.0, prompt_tokens=2290, output_tokens=316, hash_ids=(0, 42, 43, 44, 45))
    assert [row.at_s for row in rows] == pytest.approx([0.0, 3.0, 3.0, 5.999, 9.0])


def test_azure_rows_count_from_the_first() -> None:
    rows = read_trace(DATA / "azure_trace.csv")
    assert len(rows) == 5
    assert rows[0] == Row(at_s=0.0, prompt_tokens=374, output_tokens=44)
    assert (rows[1].prompt_tokens, rows[1].output_tokens) == (396, 109)
    assert rows[1].at_s == pytest.approx(4.314579, abs=1e-5)  # 18:15:46.680590 to 18:15:50.995169


def test_rows_out_of_order_are_put_in_order(tmp_path: Path) -> None:
    lines = ['{"timestamp": 2000, "input_length": 2, "output_length": 1}', '{"timestamp": 500, "input_length": 1, "output_length": 1}', ""]
    (tmp_path / "t.jsonl").write_text("\n".join(lines))
    assert [(row.at_s, row.prompt_tokens) for row in read_trace(tmp_path / "t.jsonl")] == [(0.0, 1), (1.5, 2)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "header"),
        ("a,b\n1,2\n", "header"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "no requests"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,1,1\nyesterday,1,1\n", "line 3"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,1\n", "line 2"),
        ('{"timestamp": 0, "input_length": 1, "output_length": 1}\n{"timestamp": 0}\n', "line 2"),
        ('{"timestamp": 0, "input_length": -1, "output_length": 1}\n', "line 1: a negative length"),
    ],
)
def test_a_wrong_trace_is_refused_with_its_line(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "t").write_text(text)
    with pytest.raises(StartError, match=words):
        read_trace(tmp_path / "t")


def test_a_missing_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="cannot be read"):
        read_trace(tmp_path / "none")
