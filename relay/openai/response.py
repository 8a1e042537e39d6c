"""Whole answers, not streamed: choices and usage in, the JSON body of a chat completion or completion out, a part for each choice."""

from collections.abc import Iterator, Sequence

import msgspec

from relay.messages import FinishReason
from relay.openai.jsontext import json_text, json_value
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
    """One choice, complete. An echo is part of `text`, and of `logprobs` where they were asked for: JSON, None where not."""

    index: int
    text: str
    finish_reason: FinishReason
    logprobs: bytes | None = None


def chat_response(head: Head, answers: Sequence[Answer], usage: Usage) -> Iterator[bytes]:
    return _response(head, head.chat_id, "chat.completion", b'"message":{"content":%s,"role":"assistant","refusal":null}', answers, usage)


def completion_response(head: Head, answers: Sequence[Answer], usage: Usage) -> Iterator[bytes]:
    return _response(head, head.completion_id, "text_completion", b'"text":%s', answers, usage)


def _response(head: Head, name: str, kind: str, saying: bytes, answers: Sequence[Answer], usage: Usage) -> Iterator[bytes]:
    yield b'{"id":%s,"object":"%s","created":%d,"model":%s,"choices":[' % (
        json_text(name),
        kind.encode(),
        head.created,
        json_text(head.model),
    )
    for i, answer in enumerate(answers):
        said = saying % json_text(answer.text)
        scores = b"null" if answer.logprobs is None else answer.logprobs
        finish = answer.finish_reason.encode()
        yield b'%s{"index":%d,%s,"logprobs":%s,"finish_reason":"%s"}' % (b"," if i else b"", answer.index, said, scores, finish)
    yield b'],"usage":%s,"system_fingerprint":%s}' % (json_value(usage), json_value(head.fingerprint))
