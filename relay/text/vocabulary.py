"""What a tokenizer consists of, whichever file it was read from: the BPE, the bytes of each token, and the special tokens.

Out of `relay.text.gguf_vocabulary` or `relay.text.hf_vocabulary`, into `relay.text.tokenizer.Tokenizer`.
"""

import msgspec
import tokenizers


class Special(msgspec.Struct, frozen=True):
    """A special token. One that strips takes the white space beside it into itself when it is parsed."""

    id: int
    strips_left: bool = False
    strips_right: bool = False


class Vocabulary(msgspec.Struct, frozen=True, kw_only=True):
    """Neither `bpe` nor `inner` ever produces a special token, however the text is spelled.

    bpe: encodes text that begins a prompt. inner: encodes text that follows a special token (differs only where a model puts a space
    before the first word of a text). token_bytes: by id; a special token has its spelling there. specials: by spelling, those that
    are parsed. hidden: ids that are left out of an answer's text.
    """

    bpe: tokenizers.Tokenizer
    inner: tokenizers.Tokenizer
    token_bytes: list[bytes]
    specials: dict[str, Special]
    hidden: frozenset[int]
    bos_id: int | None
    eos_ids: tuple[int, ...]
    add_bos: bool


def byte_level_alphabet() -> dict[str, int]:
    """The character that stands for each byte in a byte-level BPE (GPT-2): printable Latin-1 for itself, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def byte_level_bytes(tokens: list[str]) -> list[bytes]:
    """The bytes of each byte-level token. One with a character outside the alphabet stands for itself, as in a file's added tokens."""
    alphabet = byte_level_alphabet()
    latin = {ord(char): chr(byte) for char, byte in alphabet.items()}
    known = frozenset(alphabet)
    return [token.translate(latin).encode("latin-1") if known.issuperset(token) else token.encode() for token in tokens]
