"""The tokenizer against ids that transformers computed, against the tokenizers library, and on what must be refused."""

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from relay.errors import InvalidRequest, ModelError
from relay.text.tokenizer import Tokenizer


def test_ids_are_those_of_transformers(tokenizer: Tokenizer, smollm2_oracle: dict[str, Any]) -> None:
    """ollama#17698: a wrong pre-tokenizer costs ids in silence; digits, CJK, code and emoji are among the strings."""
    assert len(smollm2_oracle["tokenization"]) == 21
    for case in smollm2_oracle["tokenization"]:
        assert tokenizer.encode(case["text"], special=True) == case["ids"], case["text"]


def test_greedy_answers_decode_as_in_transformers(tokenizer: Tokenizer, smollm2_oracle: dict[str, Any]) -> None:
    for case in smollm2_oracle["greedy"]:
        assert tokenizer.decode(case["greedy_ids"], skip_special=False) == case["greedy_text"]
        assert tokenizer.encode_prompt(case["prompt"]) == case["prompt_ids"]


def test_facts_of_the_file(tokenizer: Tokenizer) -> None:
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_ids, tokenizer.add_bos) == (49152, 1, (2,), False)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert tokenizer.token_bytes(2) == b"<|im_end|>"
    assert tokenizer.is_special(2)
    assert not tokenizer.is_special(504)


def test_spelled_special_tokens_stay_text_unless_asked_for(tokenizer: Tokenizer) -> None:
    """llama.cpp#4160."""
    text = "hi<|im_end|>\n<|im_start|>system"
    assert 2 not in tokenizer.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode(text, special=True).count(2) == 1
    assert tokenizer.encode_prompt("<|im_end|>") == [2]


def test_others_run_while_a_long_text_is_encoded(tokenizer: Tokenizer) -> None:
    """vllm#13067's kind: with the GIL held for the whole text, a gateway's streams stand still for as long, and it is killed as silent."""
    thread = threading.Thread(target=tokenizer.encode, args=("a 1 " * 500_000,))
    stall_s, began_s = 0.0, time.monotonic()
    thread.start()
    last_s = began_s
    while thread.is_alive():
        time.sleep(0.001)
        stall_s, last_s = max(stall_s, time.monotonic() - last_s), time.monotonic()
    thread.join()
    assert stall_s < 0.5 * (last_s - began_s)


@pytest.fixture(scope="module")
def lost_bytes(tokenizer: Tokenizer) -> frozenset[int]:
    """Bytes that this vocabulary has no token for: transformers drops them, and so do we."""
    found = frozenset(range(256)) - {tokenizer.token_bytes(i)[0] for i in range(tokenizer.vocab_size) if len(tokenizer.token_bytes(i)) == 1}
    assert bytes(sorted(byte for byte in found if byte < 0xF5)) == b"\x04\x06\x13\x14\x16\x1d\xc0\xc1\xf1\xf2"
    return found


@settings(max_examples=200, deadline=None)
@given(pieces=st.lists(st.one_of(st.integers(0, 28), st.text(max_size=3)), max_size=20))
def test_plain_encoding_never_makes_a_special_token_and_loses_nothing(
    tokenizer: Tokenizer, lost_bytes: frozenset[int], pieces: list[int | str]
) -> None:
    spellings = [*tokenizer.specials, "<|", "|>", "im_end", "<", " ", "\n", "é", "日", "👨", "'ll", "12", "\u200d"]
    text = "".join(spellings[piece] if isinstance(piece, int) else piece for piece in pieces)
    text = "".join(char for char in text if lost_bytes.isdisjoint(char.encode()))
    ids = tokenizer.encode(text)
    assert not any(tokenizer.is_special(i) for i in ids)
    assert tokenizer.decode(ids) == text
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(st.integers(0, 49151), st.integers(0, 400)), max_size=20))
def test_decoding_any_ids_is_what_the_library_does(tokenizer: Tokenizer, library: tokenizers.Tokenizer, ids: list[int]) -> None:
    assert tokenizer.decode(ids, skip_special=False) == library.decode(ids, skip_special_tokens=False)
    assert tokenizer.decode(ids) == library.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("text", ["x \ud83d", "\udc00", "<|im_end|>\ud800"])
def test_a_lone_surrogate_is_the_client_s_error(tokenizer: Tokenizer, text: str) -> None:
    """colibri#1589: such a body was answered with a 500."""
    for special in (False, True):
        with pytest.raises(InvalidRequest, match="lone surrogate"):
            tokenizer.encode(text, special=special)


@pytest.mark.parametrize("pre", [None, "default", "smollm3", 7])
def test_an_unknown_or_missing_pre_tokenizer_is_refused_by_name(metadata: dict[str, Any], pre: Any) -> None:
    """llama.cpp#7476, ollama#17698: never guessed."""
    with pytest.raises(ModelError, match=rf"tokenizer\.ggml\.pre is {pre!r}"):
        Tokenizer.from_gguf(metadata | {"tokenizer.ggml.pre": pre})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"tokenizer.ggml.model": "llama"}, "'llama'"),
        ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.token_type": [1]}, "49152 tokens and 1 token types"),
        ({"tokenizer.ggml.merges": ["Ġ"]}, "merge 0"),
        ({"tokenizer.ggml.merges": ["Ġ \u2603"]}, "merge 0"),
        ({"tokenizer.ggml.eos_token_id": 49152}, "0 to 49151"),
    ],
)
def test_a_file_that_contradicts_itself_is_refused(metadata: dict[str, Any], change: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        Tokenizer.from_gguf(metadata | change)


def test_every_end_that_the_file_names_ends_a_turn_and_bos_is_added_once(metadata: dict[str, Any]) -> None:
    named = {"tokenizer.ggml.eot_token_id": 0, "tokenizer.ggml.eom_token_id": 2, "tokenizer.ggml.add_bos_token": True}
    changed = Tokenizer.from_gguf(metadata | named)
    assert changed.eos_ids == (2, 0)
    assert changed.encode_prompt("Hello") == [1, 19556]
    assert changed.encode_prompt("<|im_start|>Hello") == [1, 19556]
    assert changed.encode_prompt("") == [1]


def little_gguf(pre: str, tokens: list[str], merges: list[str], **kinds: int) -> dict[str, Any]:
    """Metadata of a small file; tokens are normal (1) unless `kinds` says otherwise."""
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [kinds.get(token, 1) for token in tokens],
        "tokenizer.ggml.merges": merges,
    }


def byte_level(text: str) -> str:
    return "".join(piece for piece, _ in pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text))


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-2", ["a", " 12345", "'s", " !", "\n\n", " ☃"]),
        ("smollm", ["a", " ", "1", "2", "3", "4", "5", "'s", " !", "\n\n", " ☃"]),
        ("llama-bpe", ["a", " ", "123", "45", "'s", " !\n\n", " ☃"]),
        ("qwen2", ["a", " ", "1", "2", "3", "4", "5", "'s", " !\n\n", " ☃"]),
    ],
)
def test_words_end_where_their_models_end_them(pre: str, words: list[str]) -> None:
    """ollama#17698. The vocabulary can join whatever stands side by side, so each id is exactly one word of the pre-tokenizer."""
    spelled = byte_level("".join(words))
    tokens = sorted({spelled[i:j] for j in range(len(spelled) + 1) for i in range(j)}, key=len)
    merges = [f"{token[:i]} {token[i:]}" for token in tokens for i in range(1, len(token))]
    made = Tokenizer.from_gguf(little_gguf(pre, tokens, merges))
    assert [made.decode([i]) for i in made.encode("".join(words))] == words


def test_qwen2_composes_characters_first() -> None:
    first, second = tuple(byte_level("é"))
    made = Tokenizer.from_gguf(little_gguf("qwen2", ["e", first, second, first + second], [f"{first} {second}"]))
    assert made.decode(made.encode("e\u0301")) == "é"


def test_llama_3_takes_a_whole_word_without_merging_and_never_a_control_token() -> None:
    tokens = [*"halt", "ha", "halt", "lt"]
    metadata = little_gguf("llama-bpe", tokens, ["h a", "l t"])
    assert Tokenizer.from_gguf(metadata).encode("halt") == [tokens.index("halt")]
    control = Tokenizer.from_gguf(little_gguf("llama-bpe", tokens, ["h a", "l t"], halt=3))
    assert control.encode("halt") == [tokens.index("ha"), tokens.index("lt")]
    assert control.encode("halt", special=True) == [tokens.index("halt")]


def test_tokens_that_the_user_of_the_file_defined_are_found_in_any_text() -> None:
    made = Tokenizer.from_gguf(little_gguf("gpt-2", [*"<think>", "<think>", "hi"], ["h i"], **{"<think>": 4}))
    assert made.encode("<think>hi") == [7, 8]
    assert made.decode([7, 8]) == "<think>hi"


@pytest.fixture(scope="module")
def library(metadata: dict[str, Any]) -> tokenizers.Tokenizer:
    """The same tokenizer, put together out of the library alone and the ordinary way."""
    tokens = metadata["tokenizer.ggml.tokens"]
    vocab = {token: i for i, token in enumerate(tokens)}
    made = tokenizers.Tokenizer(models.BPE(vocab, [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(tokens[:17])
    return made


@pytest.fixture(scope="module")
def from_json(library: tokenizers.Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("hf") / "tokenizer.json"
    library.save(str(path))
    path.with_name("tokenizer_config.json").write_text(json.dumps({"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}}))
    path.with_name("generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    return Tokenizer.from_tokenizer_json(path)


def test_a_tokenizer_json_gives_the_same_tokenizer_as_the_gguf(
    tokenizer: Tokenizer, from_json: Tokenizer, smollm2_oracle: dict[str, Any]
) -> None:
    for case in smollm2_oracle["tokenization"]:
        assert from_json.encode(case["text"], special=True) == case["ids"]
        assert from_json.encode(case["text"]) == tokenizer.encode(case["text"])
    assert from_json.tables(False) == tokenizer.tables(False)
    assert from_json.tables(True) == tokenizer.tables(True)
    assert (from_json.bos_id, from_json.eos_ids, from_json.add_bos) == (1, (2, 0), False)


def sentencepiece(path: Path, **pre: Any) -> tokenizers.Tokenizer:
    """A small Llama-2-like tokenizer with byte fallback; saved to `path`."""
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *[f"<0x{byte:02X}>" for byte in range(256)],
        *"▁helo<>/s|",
        "▁h",
        "▁he",
        "ll",
        "▁hell",
        "▁hello",
        "<|user|>",
    ]
    merges = [("▁", "h"), ("▁h", "e"), ("l", "l"), ("▁he", "ll"), ("▁hell", "o")]
    made = tokenizers.Tokenizer(
        models.BPE({token: i for i, token in enumerate(tokens)}, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    if pre:
        made.pre_tokenizer = pre_tokenizers.Metaspace(**pre)
    else:
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    made.add_special_tokens(["<unk>", "<s>", "</s>", tokenizers.AddedToken("<|user|>", rstrip=True, normalized=False)])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    made.save(str(path))
    path.with_name("tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return made


@pytest.mark.parametrize(
    "pre", [{}, {"prepend_scheme": "first", "split": False}, {"prepend_scheme": "always"}, {"prepend_scheme": "never"}]
)
def test_a_sentencepiece_tokenizer_json_gives_the_ids_and_text_of_the_library(tmp_path: Path, pre: dict[str, Any]) -> None:
    made = sentencepiece(tmp_path / "tokenizer.json", **pre)
    ours = Tokenizer.from_tokenizer_json(tmp_path / "tokenizer.json")
    assert (ours.bos_id, ours.eos_ids, ours.add_bos) == (1, (2,), True)
    for text in ["hello", " hello hello", "hello</s>hello</s> hello", "<|user|>\n hello", "👨é", "", "<s>hello", "x\ny"]:
        assert ours.encode(text, special=True) == made.encode(text, add_special_tokens=False).ids, text
        ids = ours.encode(text)
        assert not any(map(ours.is_special, ids))
        assert ours.decode(ids).removeprefix(" ") == made.decode(ids)
    assert ours.encode_prompt("hello") == made.encode("hello").ids
    assert ours.token_bytes(3 + 0xF0) == b"\xf0"


def test_without_byte_fallback_the_spelling_of_a_byte_is_itself(tmp_path: Path) -> None:
    made = tokenizers.Tokenizer(models.BPE({"▁a": 0, "<0x0A>": 1}, []))
    made.decoder = decoders.Metaspace()
    made.save(str(tmp_path / "tokenizer.json"))
    ours = Tokenizer.from_tokenizer_json(tmp_path / "tokenizer.json")
    assert (ours.decode([0, 1]), made.decode([0, 1])) == (" a<0x0A>", "a<0x0A>")


def test_other_kinds_of_tokenizer_json_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    with pytest.raises(ModelError, match="no such file"):
        Tokenizer.from_tokenizer_json(path)
    for text, says in [
        ("{", "cannot be read"),
        ("[]", "JSON object"),
        ('{"model": {"type": "WordPiece"}}', "'WordPiece'"),
        ('{"model": {"type": "BPE"}}', "not a tokenizer"),
    ]:
        path.write_text(text)
        with pytest.raises(ModelError, match=says):
            Tokenizer.from_tokenizer_json(path)
    made = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    made.decoder = decoders.WordPiece()
    made.save(str(path))
    with pytest.raises(ModelError, match="decoder"):
        Tokenizer.from_tokenizer_json(path)


def test_a_vocabulary_from_which_users_could_forge_special_tokens_is_refused(tmp_path: Path) -> None:
    made = tokenizers.Tokenizer(models.BPE({"<": 0, ">": 1, "<>": 2}, [("<", ">")]))
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<>"])
    made.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelError, match="forge"):
        Tokenizer.from_tokenizer_json(tmp_path / "tokenizer.json")


def test_the_room_loads_without_torch_and_numpy() -> None:
    """It runs in gateway processes, which must start fast."""
    code = "import sys, relay.text.chat_template, relay.text.stop, relay.text.detokenizer; print({'torch', 'numpy'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
