"""Log probabilities in OpenAI's two formats: `content` lists for chat, parallel lists for completions.

The caller hands in what each token is as text and as bytes; nothing here knows a tokenizer. JSON is made as the tokens come (`Scores`):
an evaluation's answer has tens of megabytes, which nobody should have to make, or to hold as objects, at once.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import msgspec

from relay.openai.jsontext import json_value

_LEAST = -9999.0  # what OpenAI sends for minus infinity, which JSON cannot say


class Candidate(msgspec.Struct, frozen=True, array_like=True):
    """One token at one position. `text` is the token alone, lossy where it is part of a character; `raw` is its bytes."""

    id: int
    text: str
    raw: bytes
    logprob: float


class Scored(msgspec.Struct, frozen=True, array_like=True):
    """One token of the answer, or of an echoed prompt, and the most likely ones at its position, best first.

    `piece` is its share of the choice's text: the pieces join to the text, so a token that is part of a character has "" until the one
    that completes it. `first` is true of the first token of a prompt, which nothing predicts: its log probability is null.
    """

    chosen: Candidate
    piece: str
    top: tuple[Candidate, ...] = ()
    first: bool = False


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Parallel lists. `text_offset` counts characters, the way Python does."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


def chat_logprobs(tokens: Sequence[Scored]) -> ChatLogprobs:
    return ChatLogprobs(
        [
            TokenLogprob(
                token.chosen.text,
                max(token.chosen.logprob, _LEAST),
                list(token.chosen.raw),
                [TopLogprob(top.text, max(top.logprob, _LEAST), list(top.raw)) for top in token.top],
            )
            for token in tokens
        ]
    )


def completion_logprobs(tokens: Sequence[Scored], offset: int = 0) -> CompletionLogprobs:
    """`offset` is the length of the choice's text before these tokens."""
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.piece)
    return CompletionLogprobs(
        tokens=[token.piece for token in tokens],
        token_logprobs=[None if token.first else max(token.chosen.logprob, _LEAST) for token in tokens],
        top_logprobs=[None if token.first else _by_text(token) for token in tokens],
        text_offset=offsets,
    )


def _by_text(token: Scored) -> dict[str, float]:
    """One entry for each candidate and the chosen token, none lost to another that looks the same."""
    found: dict[str, float] = {}
    candidates = token.top if any(top.id == token.chosen.id for top in token.top) else (*token.top, token.chosen)
    for candidate in candidates:
        key = candidate.text
        if key in found or ("\ufffd" in key and key.encode() != candidate.raw):
            key = "bytes:" + "".join(f"\\x{byte:02x}" for byte in candidate.raw)
        if key in found:
            key = f"token_id:{candidate.id}"
        found[key] = max(candidate.logprob, _LEAST)
    return found


class Scores(ABC):
    """Those of one choice, or of one event of it."""

    n_tokens = 0

    @abstractmethod
    def add(self, tokens: Sequence[Scored]) -> None: ...

    @abstractmethod
    def json(self) -> bytes: ...


class ChatScores(Scores):
    """As `chat_logprobs` of all the tokens."""

    def __init__(self) -> None:
        self._content: list[bytes] = []

    def add(self, tokens: Sequence[Scored]) -> None:
        if tokens:
            self.n_tokens += len(tokens)
            self._content.append(_inner(chat_logprobs(tokens).content))

    def json(self) -> bytes:
        return b'{"content":[%s],"refusal":null}' % b",".join(self._content)


class CompletionScores(Scores):
    """As `completion_logprobs` of all the tokens. `offset` is the length of the choice's text so far."""

    def __init__(self, offset: int = 0) -> None:
        self.offset = offset
        self._lists: tuple[list[bytes], ...] = ([], [], [], [])

    def add(self, tokens: Sequence[Scored]) -> None:
        if tokens:
            self.n_tokens += len(tokens)
            found = completion_logprobs(tokens, self.offset)
            self.offset += sum(len(token.piece) for token in tokens)
            lists: tuple[list[Any], ...] = (found.tokens, found.token_logprobs, found.top_logprobs, found.text_offset)
            for parts, values in zip(self._lists, lists, strict=True):
                parts.append(_inner(values))

    def json(self) -> bytes:
        shown = tuple(b",".join(parts) for parts in self._lists)
        return b'{"tokens":[%s],"token_logprobs":[%s],"top_logprobs":[%s],"text_offset":[%s]}' % shown


def _inner(values: list[Any]) -> bytes:
    """A JSON list without its brackets."""
    return json_value(values)[1:-1]
