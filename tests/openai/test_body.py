"""Values in error texts are short, whatever was sent."""

from typing import Any

import pytest

from relay.openai.body import parse_object, shown


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        (5, "5"),
        (-1.5, "-1.5"),
        (1 << 64, "an integer of 65 bits"),
        ('a"\n', '"a\\"\\n"'),
        ("é" * 49, "a string of 49 characters"),
        ([1, 2], "an array of 2"),
        ({"a": 1}, "an object"),
    ],
)
def test_a_value_is_shown_short(value: Any, text: str) -> None:
    assert shown(value) == text


def test_sound_json_is_read_as_it_is() -> None:
    assert parse_object(b' \r\n{"a": [1, -2.5, null, true, "\\u00e9\\ud83d\\ude00"], "b": {"a": 1}}\n') == {
        "a": [1, -2.5, None, True, "é😀"],
        "b": {"a": 1},
    }
