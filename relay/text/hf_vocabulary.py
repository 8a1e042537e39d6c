"""The vocabulary in a Hugging Face folder: tokenizer.json, with tokenizer_config.json and generation_config.json where they are.

Byte-level BPE (GPT-2, Llama 3, Qwen) and BPE of the SentencePiece kind (Llama 2, Mistral, Gemma: a space is U+2581, and a byte without a
token of its own is spelled <0x0A>). In: the path of tokenizer.json. Out: a `Vocabulary`; anything else is a ModelError.
"""

import re
from pathlib import Path
from typing import Any, Final

import msgspec
import tokenizers

from relay.errors import ModelError
from relay.text.vocabulary import Special, Vocabulary, byte_level_bytes

_SPACE: Final = "\u2581"
_BYTE_TOKEN: Final = re.compile("<0x([0-9A-F]{2})>")


def vocabulary_from_tokenizer_json(path: Path) -> Vocabulary:
    """Build the vocabulary. Raises ModelError where the folder holds another kind of tokenizer, or files that cannot be read."""
    described = _json(path)
    config = _json(path.with_name("tokenizer_config.json"), optional=True)
    generation = _json(path.with_name("generation_config.json"), optional=True)
    model = described.get("model") or {}
    if model.get("type") != "BPE":
        raise ModelError(f"{path}: its model is {model.get('type')!r}; BPE is what is served")
    added = {token["content"]: token for token in described.get("added_tokens") or []}
    for token in added.values():
        if token["special"] and token["single_word"]:
            raise ModelError(f"{path}: the special token {token['content']!r} is parsed as a single word only, which is not supported")
    bpe = _load(path, msgspec.json.encode(described).decode())
    ids = bpe.get_vocab(with_added_tokens=True)
    tokens = [""] * (max(ids.values()) + 1)
    for token, i in ids.items():
        tokens[i] = token
    specials = {
        content: Special(ids[content], strips_left=token["lstrip"], strips_right=token["rstrip"])
        for content, token in added.items()
        if token["special"]
    }
    token_bytes = _bytes_of(path, described.get("decoder"), tokens, frozenset(added), frozenset(specials))
    bos_id = ids.get(_spelling(config.get("bos_token")))
    ends = [ids.get(_spelling(config.get("eos_token")))]
    more_ends = generation.get("eos_token_id")
    ends += more_ends if isinstance(more_ends, list) else [more_ends]
    eos_ids = tuple(dict.fromkeys(i for i in ends if i is not None))
    begins = bpe.encode("", add_special_tokens=True).ids[:1]
    return Vocabulary(
        bpe=bpe,
        inner=_inner(path, described, bpe),
        token_bytes=token_bytes,
        specials=specials,
        hidden=frozenset(special.id for special in specials.values()) | frozenset(eos_ids),
        bos_id=bos_id,
        eos_ids=eos_ids,
        add_bos=bos_id is not None and bool(config.get("add_bos_token", begins == [bos_id])),
    )


def _load(path: Path, text: str) -> tokenizers.Tokenizer:
    try:
        bpe = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises exactly `Exception` for whatever it does not like in a file
        raise ModelError(f"{path}: not a tokenizer that the tokenizers library reads: {error}") from error
    bpe.no_truncation()
    bpe.no_padding()
    bpe.encode_special_tokens = True  # which means: as text
    return bpe


def _inner(path: Path, described: dict[str, Any], bpe: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Metaspace with the scheme `first` puts a space before the first word of a text, and so not after a special token."""
    pre = described.get("pre_tokenizer") or {}
    steps = pre.get("pretokenizers", [pre])
    if not any(step.get("type") == "Metaspace" and step.get("prepend_scheme") == "first" for step in steps):
        return bpe
    never = [step | {"prepend_scheme": "never"} if step.get("type") == "Metaspace" else step for step in steps]
    changed = described | {"pre_tokenizer": {"type": "Sequence", "pretokenizers": never}}
    return _load(path, msgspec.json.encode(changed).decode())


def _bytes_of(path: Path, decoder: Any, tokens: list[str], added: frozenset[str], specials: frozenset[str]) -> list[bytes]:
    """The true bytes of each token, by the kind of the file's decoder."""
    steps = (decoder or {}).get("decoders", [decoder or {}])
    kinds = {step.get("type") for step in steps}
    if kinds == {"ByteLevel"}:
        found = byte_level_bytes(tokens)
        return [token.encode() if token in added else data for token, data in zip(tokens, found, strict=True)]
    spaces = any(
        (step.get("type") == "Replace" and step.get("pattern") == {"String": _SPACE} and step.get("content") == " ")
        or (step.get("type") == "Metaspace" and step.get("replacement") == _SPACE)
        for step in steps
    )
    if not spaces or not kinds <= {"Replace", "Metaspace", "ByteFallback", "Fuse", "Strip"}:
        raise ModelError(f"{path}: its decoder {sorted(map(str, kinds))} is neither byte-level nor of the SentencePiece kind")
    return [_sentencepiece_bytes(token, token in added, token in specials, "ByteFallback" in kinds) for token in tokens]


def _sentencepiece_bytes(token: str, added: bool, special: bool, byte_fallback: bool) -> bytes:
    if special:
        return token.encode()
    byte = _BYTE_TOKEN.fullmatch(token)
    if byte and byte_fallback and not added:
        return bytes.fromhex(byte[1])
    return token.replace(_SPACE, " ").encode()


def _spelling(token: Any) -> str:
    """A token in tokenizer_config.json is a string or an object with its content."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else ""


def _json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(path.read_bytes())
    except FileNotFoundError as error:
        if optional:
            return {}
        raise ModelError(f"{path}: no such file; a model folder holds a tokenizer.json") from error
    except (OSError, msgspec.DecodeError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ModelError(f"{path}: expected a JSON object, found {type(found).__name__}")
    return found
