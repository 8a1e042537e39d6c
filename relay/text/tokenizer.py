"""The tokenizer: text to token ids, and the true bytes of every id.

In: a GGUF file's metadata or a Hugging Face tokenizer.json. Special tokens are never parsed out of text by accident: whoever wants them
parsed says so (`special=True`), or hands over text already split at them (`encode_split`, the way of chat templates).
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from relay.errors import InvalidRequest, ModelError
from relay.text.gguf_vocabulary import vocabulary_from_gguf
from relay.text.hf_vocabulary import vocabulary_from_tokenizer_json
from relay.text.vocabulary import Special, Vocabulary

# Unicode's White_Space property, which the tokenizers library strips by; Python's own strip takes four control characters more.
_WHITE_SPACE: Final = "\t\n\v\f\r \x85\xa0\u1680" + "".join(map(chr, range(0x2000, 0x200B))) + "\u2028\u2029\u202f\u205f\u3000"


class Tokenizer:
    """Immutable once built, so threads may share it; a text is encoded without the GIL, which is held while its ids become a list.

    bos_id: the id that begins a text, where the model has one. add_bos: whether raw prompts get it. eos_ids: all ids that end a turn.
    specials: the special tokens by spelling. longest_token: bytes of the longest token.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocab_size: int = len(vocabulary.token_bytes)
        self.bos_id: int | None = vocabulary.bos_id
        self.eos_ids: tuple[int, ...] = vocabulary.eos_ids
        self.add_bos: bool = vocabulary.add_bos
        self.specials: dict[str, Special] = vocabulary.specials
        self._bpe = vocabulary.bpe
        self._inner = vocabulary.inner
        self._hidden = vocabulary.hidden
        self._all_bytes = vocabulary.token_bytes
        self.longest_token: int = max(map(len, vocabulary.token_bytes), default=1)
        self._shown_bytes = list(vocabulary.token_bytes)
        for token_id in vocabulary.hidden:
            self._shown_bytes[token_id] = b""
        self._all_texts = [_text(data) for data in self._all_bytes]
        self._shown_texts = list(self._all_texts)
        for token_id in vocabulary.hidden:
            self._shown_texts[token_id] = ""
        self._special_spellings = spellings_pattern(self.specials)
        self._check_that_text_stays_text()

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> "Tokenizer":
        """From the metadata of a GGUF file (`relay.model.gguf_metadata.read_metadata`). Raises ModelError."""
        return cls(vocabulary_from_gguf(metadata))

    @classmethod
    def from_tokenizer_json(cls, path: Path) -> "Tokenizer":
        """From a tokenizer.json and the config files beside it. Raises ModelError."""
        return cls(vocabulary_from_tokenizer_json(path))

    @property
    def bos_token(self) -> str:
        """The spelling of `bos_id`, as chat templates want it; empty if there is none."""
        return "" if self.bos_id is None else self.token_bytes(self.bos_id).decode()

    @property
    def eos_token(self) -> str:
        """The spelling of the first of `eos_ids`; empty if there is none."""
        return self.token_bytes(self.eos_ids[0]).decode() if self.eos_ids else ""

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Ids of a text. With `special`, the spellings of special tokens in it become those tokens; without, they stay text.

        A byte that the vocabulary has no token for is left out, as the models' own tokenizers do (SmolLM2 lacks six control characters
        and the planes 4 to 11). Raises InvalidRequest for a lone surrogate, which no UTF-8 can hold.
        """
        if not special or self._special_spellings is None:
            return self._encode(self._bpe, text)
        return self.encode_split(self._special_spellings.split(text))

    def encode_split(self, parts: Sequence[str]) -> list[int]:
        """Ids of text, special token, text, special token, ..., text. Special spellings within the texts stay text."""
        ids: list[int] = []
        for i, part in enumerate(parts):
            if i % 2:
                ids.append(self.specials[part].id)
                continue
            if i and self.specials[parts[i - 1]].strips_right:
                part = part.lstrip(_WHITE_SPACE)
            if i + 1 < len(parts) and self.specials[parts[i + 1]].strips_left:
                part = part.rstrip(_WHITE_SPACE)
            if part:
                ids += self._encode(self._inner if i else self._bpe, part)
        return ids

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of the raw prompt of a completion: special tokens are parsed, as every other server does there, for the prompt is the
        caller's own template; and BOS comes first if the model wants it, but never a second time."""
        ids = self.encode(text, special=True)
        if self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def n_added(self, text: str) -> int:
        """Of the ids of `encode_prompt(text)`, how many at the front are not of the text."""
        if not self.add_bos or self.bos_id is None:
            return 0
        return 0 if text.startswith(self.token_bytes(self.bos_id).decode("utf-8", "replace")) else 1

    def token_bytes(self, token_id: int) -> bytes:
        """The true bytes of a token, which need not be whole characters. A special token has its spelling; an id without token, nothing."""
        return self._all_bytes[token_id] if 0 <= token_id < self.vocab_size else b""

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of ids as they follow other text. Bytes that are no UTF-8 become U+FFFD."""
        _, data = self.tables(skip_special)
        return b"".join([data[i] for i in ids if 0 <= i < self.vocab_size]).decode("utf-8", "replace")

    def is_special(self, token_id: int) -> bool:
        """Whether it is left out of an answer's text."""
        return token_id in self._hidden

    def tables(self, skip_special: bool) -> tuple[list[str | None], list[bytes]]:
        """By id: the text of a token where it is whole characters, else None; and its bytes. Read only: the detokenizers share them."""
        return (self._shown_texts, self._shown_bytes) if skip_special else (self._all_texts, self._all_bytes)

    def _encode(self, bpe: Any, text: str) -> list[int]:
        """By way of a batch of one: the library keeps the GIL while it encodes a single text, however long, but not for a batch."""
        try:
            ids: list[int] = bpe.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except TypeError as error:  # what the library says to a str that has no UTF-8
            raise InvalidRequest("the text has a lone surrogate (half of a \\uD83D\\uDE00 pair), which is not valid Unicode") from error
        return ids

    def _check_that_text_stays_text(self) -> None:
        """The promise of `encode`, tried on every special token: with odd merges a plain BPE could still build one."""
        ids = {special.id for special in self.specials.values()}
        for spelling in self.specials:
            if not ids.isdisjoint(self.encode(spelling)):
                raise ModelError(f"the tokenizer turns the plain text {spelling!r} into a special token: users could forge turns")


def spellings_pattern(spellings: Iterable[str]) -> re.Pattern[str] | None:
    """A pattern that splits text at special spellings, the longest first, and keeps them; None if there are none."""
    longest_first = sorted(filter(None, spellings), key=len, reverse=True)
    return re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if longest_first else None


def _text(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None
