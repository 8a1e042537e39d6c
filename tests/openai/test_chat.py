"""Chat bodies that are served, and what becomes of them."""

import json
from typing import Any

import pytest

from relay.errors import InvalidRequest
from relay.messages import Sampling
from relay.openai.chat import ChatRequest, parse_chat


def chat(**fields: Any) -> ChatRequest:
    return parse_chat(json.dumps({"messages": [{"role": "user", "content": "hi"}]} | fields).encode())


def test_the_shortest_body_gets_the_defaults() -> None:
    request = chat()
    assert request.messages == ({"role": "user", "content": "hi"},)
    assert request.add_generation_prompt
    assert not request.continue_final_message
    assert request.template_kwargs == {}
    assert request.options.sampling == Sampling()
    assert (request.options.model, request.options.n, request.options.best_of) == (None, 1, 1)
    assert request.options.max_tokens is None
    assert not request.options.stream


def test_fields_that_nobody_knows_or_that_change_no_answer_are_ignored() -> None:
    assert chat(user="u", metadata={"a": [1]}, store=False, service_tier="auto", parallel_tool_calls=True, frobnicate={"x": 1}) == chat()


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": []},
        {"tools": [{"type": "function"}], "tool_choice": "none"},
        {"tool_choice": "auto"},
        {"response_format": {"type": "text"}},
        {"functions": [], "function_call": "none"},
        {"modalities": ["text"]},
        {"use_beam_search": False, "echo": False, "best_of": 1, "add_special_tokens": False},
    ],
)
def test_a_feature_that_is_not_served_may_be_switched_off(fields: dict[str, Any]) -> None:
    assert chat(**fields) == chat()


def test_logprobs_and_top_logprobs_mean_four_different_things() -> None:
    """vllm#5008: on with 0 alternatives was taken for off."""
    assert chat(logprobs=False).options.sampling.logprobs == -1
    assert chat(logprobs=False, top_logprobs=0).options.logprobs is None
    assert chat(logprobs=True).options.sampling.logprobs == 0
    assert chat(logprobs=True, top_logprobs=0).options.logprobs == 0
    assert chat(logprobs=True, top_logprobs=20).options.sampling.logprobs == 20
    with pytest.raises(InvalidRequest):
        chat(top_logprobs=1)


def test_a_final_message_can_be_continued_instead_of_a_turn_opened() -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well"}]
    request = chat(messages=messages, continue_final_message=True)
    assert request.continue_final_message
    assert not request.add_generation_prompt
    assert not chat(messages=messages, add_generation_prompt=False).add_generation_prompt


def test_template_kwargs_reach_the_template() -> None:
    assert chat(chat_template_kwargs={"enable_thinking": False}).template_kwargs == {"enable_thinking": False}
