"""Streaming text equals whole text, for every sequence of ids."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relay.text.detokenizer import Detokenizer
from relay.text.tokenizer import Tokenizer

FAMILY = "👨‍👩‍👧"


def stream(tokenizer: Tokenizer, ids: list[int], tail: list[int] | None = None, *, skip_special: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, tail or [], skip_special=skip_special)
    return [*[detokenizer.push(i) for i in ids], detokenizer.flush()]


@pytest.fixture(scope="module")
def fragments(tokenizer: Tokenizer) -> list[int]:
    """Ids whose bytes are not whole characters."""
    found = [i for i, text in enumerate(tokenizer.tables(False)[0]) if text is None]
    assert len(found) == 313  # and one more token is U+FFFD itself
    return found


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_pushes_and_flush_are_the_whole_decode(tokenizer: Tokenizer, fragments: list[int], data: st.DataObject) -> None:
    """llama-cpp-python#372: the deltas of a stream joined are the text of the answer, byte for byte."""
    ids = data.draw(
        st.lists(st.one_of(st.sampled_from(fragments), st.integers(0, 20), st.integers(0, tokenizer.vocab_size - 1)), max_size=24)
    )
    skip_special = data.draw(st.booleans())
    assert "".join(stream(tokenizer, ids, skip_special=skip_special)) == tokenizer.decode(ids, skip_special=skip_special)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_character_is_ever_split_or_taken_back(tokenizer: Tokenizer, fragments: list[int], data: st.DataObject) -> None:
    text = data.draw(st.text(st.sampled_from("a é日👨‍🇫🤷\u200d"), max_size=12))
    ids = tokenizer.encode(text)
    parts = stream(tokenizer, ids)
    assert "".join(parts) == text
    assert not any("\ufffd" in part for part in parts)


def test_an_emoji_of_many_tokens_arrives_whole(tokenizer: Tokenizer) -> None:
    """llama-cpp-python#372."""
    ids = tokenizer.encode(FAMILY)
    assert len(ids) == 13
    parts = [part for part in stream(tokenizer, ids) if part]
    assert parts == ["👨", "\u200d", "👩", "\u200d", "👧"]


def test_a_prompt_that_ends_within_a_character_shares_only_that_character(tokenizer: Tokenizer) -> None:
    """vllm#48853: the prompt's text is not sent again; its unfinished bytes join the first token."""
    ids = tokenizer.encode("Hello 👨")
    prompt, rest = ids[:-1], ids[-1:]
    assert stream(tokenizer, rest, prompt) == ["👨", ""]
    assert stream(tokenizer, tokenizer.encode(" you"), prompt) == ["\ufffd you", ""]
    assert stream(tokenizer, rest, prompt[-1:]) == stream(tokenizer, rest, [])  # too short a tail: a stray byte, and no more


def test_a_prompt_alone_gives_no_text(tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("Hello 👨")[:-1]
    assert stream(tokenizer, [], prompt) == [""]
    assert stream(tokenizer, [2], prompt) == ["", ""]
    assert stream(tokenizer, tokenizer.encode("b"), tokenizer.encode("whole é")) == ["b", ""]


def test_a_special_token_ends_the_character_before_it(tokenizer: Tokenizer) -> None:
    unfinished = tokenizer.encode("👨")[:1]
    assert stream(tokenizer, tokenizer.encode("x"), [*unfinished, 2]) == ["x", ""]


def test_special_tokens_are_left_out_or_spelled(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("bye"), 2]
    assert "".join(stream(tokenizer, ids)) == "bye"
    assert "".join(stream(tokenizer, ids, skip_special=False)) == "bye<|im_end|>"


def test_a_character_that_is_never_finished_is_one_replacement(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("👩")
    for n in range(1, len(ids)):
        parts = stream(tokenizer, ids[:n])
        assert parts == [*[""] * n, "\ufffd"]


def test_an_id_without_a_token_is_no_text(tokenizer: Tokenizer) -> None:
    """Models are often padded to more output rows than the tokenizer has ids (vllm#9634)."""
    assert stream(tokenizer, [tokenizer.vocab_size, -1]) == ["", "", ""]
    assert tokenizer.decode([tokenizer.vocab_size, -1]) == ""
