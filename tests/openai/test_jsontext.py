"""JSON text for the wire."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relay.openai.jsontext import json_text, json_value


@settings(max_examples=300, deadline=None, database=None, derandomize=True)
@given(st.text())
def test_any_text_comes_back_from_one_line(text: str) -> None:
    for out in (json_text(text), json_value(text)):
        assert json.loads(out) == text
        assert len(out.decode().splitlines()) == 1


@pytest.mark.parametrize(
    "text", ["\n\r\x0b\x0c\x1c\x1d\x1e", "\x85", "\u2028\u2029", "Â\x85", "\\u2028", '"\\', "\x00\x7f", "âa😀\U0010ffff"]
)
def test_no_character_ends_a_line_for_any_reader(text: str) -> None:
    """Python's str.splitlines, which httpx uses for lines, knows more line ends than the protocol."""
    assert json.loads(json_text(text)) == text
    assert len(json_text(text).decode().splitlines()) == 1
