"""Whole answers, not streamed: choices and usage in, the JSON body of a chat completion or completion out."""

from collections.abc import Sequence
from typing import Literal

import msgspec

from relay.messages import FinishReason
from relay.openai.jsontext import json_value
from relay.openai.logprob import ChatLogprobs, CompletionLogprobs, Scored, chat_logprobs, completion_logprobs
from relay.openai.usage import Usage


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """What every response and every chunk of one request repeats. `created` is Unix time in seconds."""

    request_id: str
    created: int
    model: str
    fingerprint: str | None = None

    @property
    def chat_id(self) -> str:
        return f"chatcmpl-{self.request_id}"

    @property
    def completion_id(self) -> str:
        return f"cmpl-{self.request_id}"


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One choice, complete. An echo is part of `text`, and of `logprobs` where they were asked for; None where not."""

    index: int
    text: str
    finish_reason: FinishReason
    logprobs: Sequence[Scored] | None = None


class _ChatMessage(msgspec.Struct, frozen=True):
    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class _ChatChoice(msgspec.Struct, frozen=True):
    index: int
    message: _ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class _CompletionChoice(msgspec.Struct, frozen=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason


class _Response(msgspec.Struct, frozen=True):
    id: str
    object: Literal["chat.completion", "text_completion"]
    created: int
    model: str
    choices: list[_ChatChoice] | list[_CompletionChoice]
    usage: Usage
    system_fingerprint: str | None


def chat_response(head: Head, answers: Sequence[Answer], usage: Usage) -> bytes:
    choices = [
        _ChatChoice(
            answer.index,
            _ChatMessage(answer.text),
            None if answer.logprobs is None else chat_logprobs(answer.logprobs),
            answer.finish_reason,
        )
        for answer in answers
    ]
    return json_value(_Response(head.chat_id, "chat.completion", head.created, head.model, choices, usage, head.fingerprint))


def completion_response(head: Head, answers: Sequence[Answer], usage: Usage) -> bytes:
    choices = [
        _CompletionChoice(
            answer.index,
            answer.text,
            None if answer.logprobs is None else completion_logprobs(answer.logprobs),
            answer.finish_reason,
        )
        for answer in answers
    ]
    return json_value(_Response(head.completion_id, "text_completion", head.created, head.model, choices, usage, head.fingerprint))
