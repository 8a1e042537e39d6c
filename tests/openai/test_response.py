"""Whole answers, as the official client's types read them in strict mode."""

import json

from openai.types import Completion
from openai.types.chat import ChatCompletion

from relay.openai.logprob import Candidate, ChatScores, CompletionScores, Scored, Scores
from relay.openai.response import Answer, Head, chat_response, completion_response
from relay.openai.usage import usage

HEAD = Head(request_id="r1", created=1700000000, model='m"x', fingerprint="fp")
USAGE = usage(prompt=5, completion=7, cached=3)
SCORED = Scored(Candidate(3, " a", b" a", -0.5), " a", (Candidate(3, " a", b" a", -0.5), Candidate(4, "\ufffd", b"\xf0", -2.0)))


def of(scores: Scores, *tokens: Scored) -> bytes:
    """Added one by one."""
    for token in tokens:
        scores.add([token])
    return scores.json()


def test_a_chat_completion_reads_strictly() -> None:
    """vllm#3179: chat used the completions' logprobs. vllm#16863: the choices of n > 1 overwrote each other."""
    answers = [
        Answer(index=0, text=" a", finish_reason="stop", logprobs=of(ChatScores(), SCORED)),
        Answer(index=1, text='é\u2028"\\\x00😀', finish_reason="length"),
        Answer(index=2, text="", finish_reason="stop", logprobs=of(ChatScores())),
    ]
    found = ChatCompletion.model_validate_json(b"".join(chat_response(HEAD, answers, USAGE)), strict=True)
    assert (found.id, found.object, found.created, found.model) == ("chatcmpl-r1", "chat.completion", 1700000000, 'm"x')
    assert found.system_fingerprint == "fp"
    assert [choice.index for choice in found.choices] == [0, 1, 2]
    assert [choice.finish_reason for choice in found.choices] == ["stop", "length", "stop"]
    assert [choice.message.content for choice in found.choices] == [" a", 'é\u2028"\\\x00😀', ""]
    assert found.choices[0].message.role == "assistant"
    logprobs = found.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    (token,) = logprobs.content
    assert (token.token, token.logprob, token.bytes) == (" a", -0.5, [32, 97])
    assert [(top.token, top.bytes) for top in token.top_logprobs] == [(" a", [32, 97]), ("\ufffd", [0xF0])]
    assert found.choices[1].logprobs is None
    assert found.choices[2].logprobs is not None
    assert found.choices[2].logprobs.content == []


def test_a_completion_reads_strictly() -> None:
    answers = [
        Answer(index=0, text=" a", finish_reason="stop", logprobs=of(CompletionScores(), SCORED)),
        Answer(index=1, text="x", finish_reason="length"),
    ]
    found = Completion.model_validate_json(b"".join(completion_response(HEAD, answers, USAGE)), strict=True)
    assert (found.id, found.object, found.system_fingerprint) == ("cmpl-r1", "text_completion", "fp")
    assert [(choice.index, choice.text, choice.finish_reason) for choice in found.choices] == [(0, " a", "stop"), (1, "x", "length")]
    logprobs = found.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == [" a"]
    assert logprobs.top_logprobs == [{" a": -0.5, "bytes:\\xf0": -2.0}]
    assert logprobs.text_offset == [0]
    assert found.choices[1].logprobs is None


def test_an_echo_is_part_of_the_text_and_of_the_logprobs() -> None:
    """vllm#2706 and vllm#6521: an echo with no new token is the prompt, its first token without a log probability."""
    prompt = [Scored(Candidate(1, "Hi", b"Hi", 0.0), "Hi", first=True), SCORED]
    answers = [Answer(index=0, text="Hi a", finish_reason="length", logprobs=of(CompletionScores(), *prompt))]
    head = Head(request_id="r", created=1, model="m")
    body = json.loads(b"".join(completion_response(head, answers, usage(prompt=2, completion=0, cached=0))))
    assert body["choices"][0]["text"] == "".join(body["choices"][0]["logprobs"]["tokens"]) == "Hi a"
    assert body["choices"][0]["logprobs"]["token_logprobs"] == [None, -0.5]
    assert body["choices"][0]["logprobs"]["top_logprobs"][0] is None
    assert body["system_fingerprint"] is None


def test_usage_adds_up() -> None:
    body = json.loads(b"".join(chat_response(HEAD, [], USAGE)))
    assert body["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 7,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
