"""Token ids of one answer, one at a time, to the text that is complete so far.

A token need not be whole characters: an emoji is often four tokens of a byte or two. `push` returns only characters that no later token
can change, so what it returns can be sent. The law: all pushes and the flush together are `Tokenizer.decode` of the same ids.
"""

import codecs
from collections.abc import Sequence

from relay.text.tokenizer import Tokenizer


class Detokenizer:
    """Of one answer. Streamed and whole answers both go through it, so they cannot differ.

    prompt_tail: the last ids of the prompt (all of them will do). A prompt of ids may end within a character: those bytes join the first
    generated ones, and nothing else of the prompt comes out.
    """

    __slots__ = ("_bytes", "_only_prompt", "_pending", "_size", "_texts")

    def __init__(self, tokenizer: Tokenizer, prompt_tail: Sequence[int] = (), *, skip_special: bool = True) -> None:
        self._texts, self._bytes = tokenizer.tables(skip_special)
        self._size = tokenizer.vocab_size
        self._pending = _unfinished(tokenizer, prompt_tail)
        self._only_prompt = True

    def push(self, token_id: int) -> str:
        """Take the next id; returns the characters that are complete now, often the empty string within one."""
        if not 0 <= token_id < self._size:
            return ""
        if not self._pending:
            text = self._texts[token_id]
            if text is not None:
                return text
        data = self._bytes[token_id]
        if not data:
            return ""
        self._only_prompt = False
        data = self._pending + data
        text, n_bytes = codecs.utf_8_decode(data, "replace", False)
        self._pending = data[n_bytes:]
        return text

    @property
    def unfinished(self) -> bool:
        """Whether the answer so far ends within a character."""
        return bool(self._pending) and not self._only_prompt

    def flush(self) -> str:
        """The end of the answer: U+FFFD for a character that was begun and never finished."""
        unfinished, self._pending = self._pending, b""
        return "" if self._only_prompt else unfinished.decode("utf-8", "replace")


def _unfinished(tokenizer: Tokenizer, ids: Sequence[int]) -> bytes:
    """The bytes at the end of a prompt that begin a character and do not end it. A special token ends it: its spelling follows it."""
    data = b""
    for token_id in reversed(ids):
        if len(data) >= 3:
            break
        data = tokenizer.token_bytes(token_id) + data
    _, n_bytes = codecs.utf_8_decode(data, "replace", False)
    return data[n_bytes:]
