"""One streamed answer: the bytes of its body and when they came in, what was measured out.

Reads both endpoints (`text`, `delta.content`, and `delta.reasoning_content` of servers that split a model's thinking off). Of several
choices only the first is measured: the generator asks for one.
"""

from array import array
from typing import Any

import msgspec

from relay.bench.sse import EventReader


class _Delta(msgspec.Struct, gc=False):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct, gc=False):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _PromptDetails(msgspec.Struct, gc=False):
    cached_tokens: int | None = None


class Usage(msgspec.Struct, gc=False):
    """As OpenAI has it; each is None where the server is silent about it."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None

    @property
    def cached_tokens(self) -> int | None:
        return self.prompt_tokens_details.cached_tokens if self.prompt_tokens_details else None


class _Timings(msgspec.Struct, gc=False):
    """llama.cpp's own way to say how much of the prompt was cached."""

    cache_n: int | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: Usage | None = None
    timings: _Timings | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


class Answer:
    """`chunk_s` is when each chunk with text came; `done` is whether `[DONE]` did, at `done_s`."""

    __slots__ = ("_events", "cached_tokens", "chunk_s", "done", "done_s", "error", "finish_reason", "problem", "usage")

    def __init__(self) -> None:
        self._events = EventReader()
        self.chunk_s: array[float] = array("d")
        self.done = False
        self.done_s = 0.0
        self.finish_reason: str | None = None
        self.usage = Usage()
        self.cached_tokens: int | None = None
        self.error = ""
        self.problem = ""

    def feed(self, data: bytes, now: float) -> None:
        """More of the body."""
        for payload in self._events.feed(data):
            if payload == b"[DONE]":
                self.done, self.done_s = True, now
                continue
            try:
                event = _decode(payload)
            except msgspec.DecodeError as error:
                self.problem = f"an event that is not understood ({error}): {payload[:120]!r}"
                continue
            self._take(event, now)

    def since(self, epoch: float) -> "array[float]":
        """When each chunk with text came, after `epoch`."""
        return array("d", [at - epoch for at in self.chunk_s])

    def _take(self, event: _Event, now: float) -> None:
        if event.choices:
            choice = event.choices[0]
            delta = choice.delta
            if choice.text or (delta is not None and (delta.content or delta.reasoning_content)):
                self.chunk_s.append(now)
            if choice.finish_reason is not None:
                self.finish_reason = choice.finish_reason
        if event.usage is not None:
            self.usage = event.usage
            self.cached_tokens = event.usage.cached_tokens
        if event.timings is not None and self.cached_tokens is None:
            self.cached_tokens = event.timings.cache_n
        if event.error is not None:
            self.error = error_text(event.error)


def error_text(error: Any) -> str:
    """The words in an OpenAI-shaped error, or whatever came in its place."""
    if isinstance(error, dict):
        error = error.get("message", error)
    return str(error)[:300]
