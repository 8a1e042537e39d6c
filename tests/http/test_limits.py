"""x-ratelimit headers as clients read them."""

import pytest

from relay.http.limits import duration, most_tokens, rate_headers
from relay.messages import Limits, Standing


@pytest.fixture(autouse=True)
def _law_of_blocks() -> None:
    """No server, no blocks."""


@pytest.mark.parametrize(
    ("ms", "text"),
    [(0, "0s"), (1, "1ms"), (120, "120ms"), (1000, "1s"), (7660, "7.66s"), (59_999, "59.999s"), (60_000, "1m0s"), (360_000, "6m0s")],
)
def test_durations_are_written_as_openai_writes_them(ms: int, text: str) -> None:
    assert duration(ms) == text


def test_only_limits_that_a_key_has_are_told() -> None:
    standing = Standing(3, 500, 40, 61_500)
    assert rate_headers(Limits(), standing) == {}
    assert rate_headers(Limits(concurrency=3), standing) == {}
    assert rate_headers(Limits(tokens=100), standing) == {
        "x-ratelimit-limit-tokens": "100",
        "x-ratelimit-remaining-tokens": "40",
        "x-ratelimit-reset-tokens": "1m1.5s",
    }
    assert rate_headers(Limits(requests=5), standing) == {
        "x-ratelimit-limit-requests": "5",
        "x-ratelimit-remaining-requests": "3",
        "x-ratelimit-reset-requests": "500ms",
    }


@pytest.mark.parametrize(("tokens", "n_prompt", "n_choices", "most"), [(0, 5, 1, None), (100, 20, 1, 80), (100, 20, 3, 26), (10, 20, 1, 1)])
def test_who_names_no_number_gets_what_its_minute_holds(tokens: int, n_prompt: int, n_choices: int, most: int | None) -> None:
    assert most_tokens(Limits(tokens=tokens), n_prompt, n_choices) == most
