"""The vocabulary in a GGUF file's metadata: a byte-level BPE of tokens, merges and the name of its pre-tokenizer.

In: metadata as `relay.model.gguf_metadata` reads it. Out: a `Vocabulary`. The pre-tokenizer decides where words end, and a wrong one gives
plausible, slightly different ids without any error; so an unknown or missing name is a ModelError, never a guess. The rules are those
that the models' own tokenizer.json files state.
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec
import tokenizers
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from relay.errors import ModelError
from relay.text.vocabulary import Special, Vocabulary, byte_level_bytes

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5

_WORDS_LLAMA3: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WORDS_QWEN2: Final = _WORDS_LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


class _Pre(msgspec.Struct, frozen=True):
    """One pre-tokenizer. words: None takes GPT-2's own rule. whole_words: a word that is itself a token is not merged anew."""

    words: str | None = None
    single_digits: bool = False
    nfc: bool = False
    whole_words: bool = False
    add_bos: bool = False


_LLAMA3: Final = _Pre(words=_WORDS_LLAMA3, whole_words=True, add_bos=True)
PRE_TOKENIZERS: Final = {
    "gpt-2": _Pre(),
    "smollm": _Pre(single_digits=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _Pre(words=_WORDS_QWEN2, nfc=True),
}


def vocabulary_from_gguf(metadata: Mapping[str, Any]) -> Vocabulary:
    """Build the vocabulary. Raises ModelError where the file names a tokenizer that is not known here, or contradicts itself."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ModelError(f"the file's tokenizer.ggml.model is {kind!r}; `gpt2` (byte-level BPE) is what is served")
    pre_name = metadata.get("tokenizer.ggml.pre")
    if pre_name not in PRE_TOKENIZERS:
        raise ModelError(
            f"the file's tokenizer.ggml.pre is {pre_name!r}; known are {', '.join(PRE_TOKENIZERS)}. "
            "It says where words end, and guessing it would give wrong tokens in silence: convert the model with a current llama.cpp"
        )
    pre = PRE_TOKENIZERS[pre_name]
    tokens: list[str] = _list(metadata, "tokens", str)
    kinds: list[int] = _list(metadata, "token_type", int)
    if len(kinds) != len(tokens):
        raise ModelError(f"the file has {len(tokens)} tokens and {len(kinds)} token types; they must be as many")
    if len(frozenset(tokens)) != len(tokens):
        raise ModelError("the file's vocabulary has the same token twice")
    specials = {token: Special(i) for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind in (_CONTROL, _UNKNOWN)}
    bos_id = _token_id(metadata, "bos", len(tokens))
    eos_ids = [_token_id(metadata, name, len(tokens)) for name in ("eos", "eot", "eom")]
    ends = tuple(dict.fromkeys(i for i in eos_ids if i is not None))
    literal = [i for i, kind in enumerate(kinds) if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED)]
    token_bytes = byte_level_bytes(tokens)
    for i in literal:
        token_bytes[i] = tokens[i].encode()
    bpe = _bpe(pre, tokens, kinds, _list(metadata, "merges", str))
    return Vocabulary(
        bpe=bpe,
        inner=bpe,
        token_bytes=token_bytes,
        specials=specials,
        hidden=frozenset(i for i in literal if kinds[i] != _USER_DEFINED) | frozenset(ends),
        bos_id=bos_id,
        eos_ids=ends,
        add_bos=bos_id is not None and bool(metadata.get("tokenizer.ggml.add_bos_token", pre.add_bos)),
    )


def _bpe(pre: _Pre, tokens: list[str], kinds: list[int], merges: list[str]) -> tokenizers.Tokenizer:
    """The BPE without its special tokens: text that spells one stays text."""
    vocab = {token: i for i, token in enumerate(tokens) if kinds[i] not in (_UNKNOWN, _CONTROL, _UNUSED)}
    pairs: list[tuple[str, str]] = []
    for merge in merges:
        left, space, right = merge.partition(" ")
        if not space or left not in vocab or right not in vocab or left + right not in vocab:
            raise ModelError(f"the file's merge {len(pairs)}, {merge!r}, does not join two of its tokens into a third")
        pairs.append((left, right))
    bpe = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=pre.whole_words))
    if pre.nfc:
        bpe.normalizer = normalizers.NFC()
    steps: list[pre_tokenizers.PreTokenizer] = []
    if pre.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if pre.words is not None:
        steps.append(pre_tokenizers.Split(Regex(pre.words), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.words is None))
    bpe.pre_tokenizer = pre_tokenizers.Sequence(steps)
    bpe.add_tokens([AddedToken(tokens[i], normalized=False) for i, kind in enumerate(kinds) if kind == _USER_DEFINED])
    return bpe


def _list(metadata: Mapping[str, Any], name: str, kind: type) -> Any:
    """A list of the tokenizer's that must be there."""
    found = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(found, list) or not found or not isinstance(found[0], kind):
        raise ModelError(f"the file has no tokenizer.ggml.{name}: it is not a model with a tokenizer")
    return found


def _token_id(metadata: Mapping[str, Any], name: str, n_tokens: int) -> int | None:
    """An id that the file may name."""
    found = metadata.get(f"tokenizer.ggml.{name}_token_id")
    if found is None:
        return None
    if type(found) is not int or not 0 <= found < n_tokens:
        raise ModelError(f"the file's tokenizer.ggml.{name}_token_id is {found!r}; its vocabulary has ids 0 to {n_tokens - 1}")
    return found
