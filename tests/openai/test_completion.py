"""Completion bodies that are served, and what becomes of them."""

import json
from typing import Any

import pytest

from relay.openai.completion import CompletionRequest, parse_completion


def completion(**fields: Any) -> CompletionRequest:
    return parse_completion(json.dumps({"prompt": "hi"} | fields).encode())


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ("a",)),
        (["a", "b"], ("a", "b")),
        ([1, 0], ((1, 0),)),
        ([[1], [2, 3]], ((1,), (2, 3))),
        ("\x00", ("\x00",)),
        (" ", (" ",)),
        ("👨‍👩‍👧", ("👨‍👩‍👧",)),
    ],
)
def test_all_four_forms_of_a_prompt_are_taken(prompt: Any, prompts: Any) -> None:
    """vllm#1270: a list of prompts was rejected."""
    request = completion(prompt=prompt)
    assert request.prompts == prompts
    request.check(4)


def test_a_surrogate_pair_is_one_character() -> None:
    assert parse_completion(b'{"prompt":"\\ud83d\\ude00"}').prompts == ("😀",)


def test_an_echo_may_ask_for_no_new_token_and_for_the_prompts_logprobs() -> None:
    """vllm#6521: echo with max_tokens 0 killed the server."""
    request = completion(echo=True, max_tokens=0, logprobs=1)
    assert request.echo
    assert request.options.max_tokens == 0
    assert request.prompt_logprobs == 1
    assert completion(echo=True, max_tokens=1).prompt_logprobs == -1
    assert completion(echo=True, logprobs=0).prompt_logprobs == 0
    assert completion(logprobs=5).prompt_logprobs == -1


def test_the_best_are_chosen_by_logprobs_that_the_client_did_not_ask_for() -> None:
    options = completion(n=2, best_of=4).options
    assert (options.n, options.best_of, options.logprobs, options.sampling.logprobs) == (2, 4, None, 0)
    assert completion(best_of=4, logprobs=3).options.sampling.logprobs == 3
    options = completion(n=2, best_of=2, stream=True).options
    assert (options.best_of, options.sampling.logprobs) == (2, -1)


def test_an_empty_suffix_is_no_suffix() -> None:
    assert completion(suffix="", add_special_tokens=True) == completion(suffix=None)
