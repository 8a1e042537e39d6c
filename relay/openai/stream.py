"""Streamed answers: pieces of text in, server-sent events out, in the order that clients rely on.

Of each choice: (chat only) one event with the role, events with text, one event with the finish reason; then, if asked for, one event
with usage and no choices; then `DONE`. A stream that fails ends in `error_event` instead, from which the official client raises. One
object per request: the bytes around a text are made once for each choice, not once for each token.
"""

from abc import ABC, abstractmethod
from collections.abc import Container

from relay.errors import RequestError
from relay.messages import FinishReason
from relay.openai.error import error_body
from relay.openai.jsontext import json_text, json_value
from relay.openai.logprob import ChatScores, CompletionScores, Scores
from relay.openai.response import Head
from relay.openai.usage import Usage

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


def error_event(error: RequestError, request_id: str) -> bytes:
    """The last event of a stream that failed; no `DONE` follows."""
    return b"data: " + error_body(error, request_id) + b"\n\n"


class EventStream(ABC):
    """What both endpoints share. `usage` arguments are for clients that asked for it on every event; None else."""

    def __init__(
        self,
        head: bytes,
        n: int,
        *,
        opening: bytes,
        before: bytes,
        after: bytes,
        empty: bytes,
        include_usage: bool,
        continued: Container[int] = (),
    ) -> None:
        """`n` choices, of which the `continued` ones were opened before. `head` is an event up to its choices; the rest are parts of a
        choice: `opening` tells the role, `before` and `after` stand around a text, `empty` has none."""
        self._head = head
        self._empty = empty
        self._end = b',"usage":null}\n\n' if include_usage else b"}\n\n"
        self._after = after + b',"logprobs":'
        self._rest = b'%snull,"finish_reason":null}]%s' % (self._after, self._end)
        self._before = [b'%s[{"index":%d,%s' % (head, choice, before) for choice in range(n)]
        openings = (b"" if choice in continued else self._open(choice, opening) for choice in range(n))
        self._prefix = [each + before for each, before in zip(openings, self._before, strict=True)]
        self._unfinished = n

    def text(self, choice: int, text: str, *, scores: Scores | None = None, usage: Usage | None = None) -> bytes:
        """More text of a choice, and its tokens' log probabilities if asked for; the first time, the role goes before it."""
        prefix = self._prefix[choice]
        assert prefix, "text after the finish"
        self._prefix[choice] = self._before[choice]
        if scores is None and usage is None:
            return prefix + json_text(text) + self._rest
        scored = b"null" if scores is None else scores.json()
        return b"".join((prefix, json_text(text), self._after, scored, b',"finish_reason":null}]', self._close(usage)))

    def finish(self, choice: int, reason: FinishReason, *, usage: Usage | None = None) -> bytes:
        """The last event of a choice, without text."""
        prefix = self._prefix[choice]
        assert prefix, "finished twice"
        self._prefix[choice] = b""
        self._unfinished -= 1
        last = b'[{"index":%d,%s,"logprobs":null,"finish_reason":"%s"}]' % (choice, self._empty, reason.encode())
        return b"".join((prefix.removesuffix(self._before[choice]), self._head, last, self._close(usage)))

    def usage(self, usage: Usage) -> bytes:
        """After all choices are finished, for clients that asked for usage."""
        assert self._unfinished == 0, "usage before the last finish"
        return b'%s[],"usage":%s}\n\n' % (self._head, json_value(usage))

    def _open(self, choice: int, opening: bytes) -> bytes:
        if not opening:
            return b""
        return b'%s[{"index":%d,%s,"logprobs":null,"finish_reason":null}]%s' % (self._head, choice, opening, self._end)

    def _close(self, usage: Usage | None) -> bytes:
        return self._end if usage is None else b',"usage":%s}\n\n' % json_value(usage)

    @abstractmethod
    def scores(self, offset: int) -> Scores:
        """Where the log probabilities of one event go; `offset` is the length of its choice's text before it, an echo included."""


class ChatStream(EventStream):
    """Events of `POST /v1/chat/completions`."""

    def __init__(self, head: Head, n: int, *, include_usage: bool = False, continued: Container[int] = ()) -> None:
        super().__init__(
            _head(head.chat_id, "chat.completion.chunk", head),
            n,
            opening=b'"delta":{"role":"assistant","content":""}',
            before=b'"delta":{"content":',
            after=b"}",
            empty=b'"delta":{}',
            include_usage=include_usage,
            continued=continued,
        )

    def scores(self, offset: int) -> Scores:
        return ChatScores()


class CompletionStream(EventStream):
    """Events of `POST /v1/completions`; `n` counts the choices of all prompts. An echo is sent as text, in front."""

    def __init__(self, head: Head, n: int, *, include_usage: bool = False) -> None:
        super().__init__(
            _head(head.completion_id, "text_completion", head),
            n,
            opening=b"",
            before=b'"text":',
            after=b"",
            empty=b'"text":""',
            include_usage=include_usage,
        )

    def scores(self, offset: int) -> Scores:
        return CompletionScores(offset)


def _head(name: str, kind: str, head: Head) -> bytes:
    fingerprint = b"null" if head.fingerprint is None else json_text(head.fingerprint)
    return b'data: {"id":%s,"object":"%s","created":%d,"model":%s,"system_fingerprint":%s,"choices":' % (
        json_text(name),
        kind.encode(),
        head.created,
        json_text(head.model),
        fingerprint,
    )
