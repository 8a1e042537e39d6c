"""What both endpoints share."""

import json
from typing import Any

import pytest

from relay.openai.completion import parse_completion
from relay.openai.options import Options


def options(**fields: Any) -> Options:
    return parse_completion(json.dumps({"prompt": "hi"} | fields).encode()).options


def test_both_names_of_max_tokens_are_taken() -> None:
    """vllm#6707: a request without one, or with both."""
    assert options().max_tokens is None
    assert options(max_tokens=5).max_tokens == 5
    assert options(max_completion_tokens=5).max_tokens == 5
    assert options(max_completion_tokens=5, max_tokens=5).max_tokens == 5
    assert options(max_tokens=1_000_000_000).max_tokens == 1_000_000_000


def test_min_tokens_may_reach_max_tokens() -> None:
    assert options(min_tokens=5, max_tokens=5).min_tokens == 5
    assert options(min_tokens=5).min_tokens == 5


def test_stops_are_a_string_or_a_list_without_repeats() -> None:
    assert options(stop="\n").stop == ("\n",)
    assert options(stop=[]).stop == ()
    assert options(stop=["b", "a", "b"]).stop == ("b", "a")
    assert options(stop="x" * 200, stop_token_ids=[2, 0, 2]).stop_ids == (2, 0)
    assert options(stop=[str(i) for i in range(16)]).stop[15] == "15"


@pytest.mark.parametrize(
    ("given", "include", "continuous"),
    [
        (None, False, False),
        ({}, False, False),
        ({"include_usage": None}, False, False),
        ({"include_usage": False, "continuous_usage_stats": True}, False, False),
        ({"include_usage": True}, True, False),
        ({"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": False}, True, True),
    ],
)
def test_usage_is_streamed_only_if_asked_for(given: Any, include: bool, continuous: bool) -> None:
    """vllm#36379: stream_options {} was taken for include_usage."""
    found = options(stream=True, stream_options=given)
    assert (found.include_usage, found.continuous_usage) == (include, continuous)


def test_flags_and_places_are_read() -> None:
    found = options(
        model="m",
        ignore_eos=True,
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        priority=-10,
        cache_salt="s",
        stream=True,
        n=128,
    )
    assert (found.model, found.ignore_eos, found.include_stop, found.skip_special_tokens) == ("m", True, True, False)
    assert (found.priority, found.salt, found.stream, found.n) == (-10, "s", True, 128)
