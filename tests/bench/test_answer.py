"""What is read from the events of one streamed answer."""

import json
from typing import Any

import pytest

from relay.bench.answer import Answer


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def chat(**delta: Any) -> bytes:
    return event(choices=[{"index": 0, "delta": delta, "finish_reason": None}])


def test_the_first_token_is_the_first_text_that_is_not_empty() -> None:
    answer = Answer()
    answer.feed(chat(role="assistant", content=""), 1.0)
    answer.feed(b": keep-alive\n\n", 2.0)
    answer.feed(chat(content="Hi"), 3.0)
    answer.feed(chat(content=" you"), 4.0)
    answer.feed(event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}]), 5.0)
    answer.feed(b"data: [DONE]\n\n", 6.0)
    assert list(answer.chunk_s) == [3.0, 4.0]
    assert list(answer.since(3.0)) == [0.0, 1.0]
    assert (answer.finish_reason, answer.done, answer.done_s) == ("stop", True, 6.0)


def test_completions_and_thinking_count_as_text() -> None:
    answer = Answer()
    answer.feed(event(choices=[{"index": 0, "text": "Hi", "logprobs": None, "finish_reason": None}]), 1.0)
    answer.feed(chat(reasoning_content="hmm"), 2.0)
    assert list(answer.chunk_s) == [1.0, 2.0]


def test_usage_with_and_without_details() -> None:
    answer = Answer()
    answer.feed(event(choices=[], usage={"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}), 1.0)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.cached_tokens) == (7, 3, None)
    answer.feed(event(choices=[], usage={"prompt_tokens": 7, "prompt_tokens_details": {"cached_tokens": 4}}), 1.0)
    assert answer.cached_tokens == 4
    answer.feed(event(choices=[], usage=None, timings={"cache_n": 9}), 1.0)
    assert answer.cached_tokens == 4, "usage goes before a server's own way"


def test_llama_cpps_timings_tell_cached_tokens_where_usage_does_not() -> None:
    answer = Answer()
    answer.feed(event(choices=[], usage={"prompt_tokens": 7}, timings={"cache_n": 5, "prompt_ms": 1.5}), 1.0)
    assert answer.cached_tokens == 5


@pytest.mark.parametrize("error", [{"message": "no worker is left", "code": "worker_lost"}, "no worker is left"])
def test_an_error_event_gives_its_words(error: Any) -> None:
    answer = Answer()
    answer.feed(event(error=error), 1.0)
    assert answer.error == "no worker is left"
    assert not answer.done


def test_an_event_that_is_no_json_is_a_problem_and_ends_nothing() -> None:
    answer = Answer()
    answer.feed(b"data: {oops\n\n" + chat(content="x"), 1.0)
    assert "{oops" in answer.problem
    assert list(answer.chunk_s) == [1.0]
