"""Log probabilities in both formats."""

import pytest

from relay.openai.jsontext import json_value
from relay.openai.logprob import Candidate, ChatScores, CompletionScores, Scored, chat_logprobs, completion_logprobs

INF = float("inf")


def plain(text: str, logprob: float = -1.0, *, first: bool = False) -> Scored:
    return Scored(Candidate(len(text), text, text.encode(), logprob), text, first=first)


def shrug() -> list[Scored]:
    """An emoji of four tokens of a byte each: each alone is no text, the last one completes it."""
    raw = "🤷".encode()
    return [Scored(Candidate(byte, "\ufffd", bytes([byte]), -0.5), "🤷" if i == 3 else "") for i, byte in enumerate(raw)]


def test_bytes_of_tokens_join_to_the_text_where_the_text_of_tokens_cannot() -> None:
    """vllm#6626: byte fragments could not be told apart."""
    content = chat_logprobs([plain("a "), *shrug()]).content
    assert bytes(byte for token in content for byte in token.bytes).decode() == "a 🤷"
    assert content[1].token == "\ufffd"


def test_chat_lists_exactly_the_candidates_that_were_asked_for() -> None:
    """vllm#5008: 0 alternatives is an empty list, not the chosen token. sglang#32290: five that look alike stay five."""
    assert chat_logprobs([plain("a")]).content[0].top_logprobs == []
    alike = tuple(Candidate(i, "\ufffd", bytes([0xF0 + i]), -float(i)) for i in range(5))
    content = chat_logprobs([Scored(alike[0], "", alike)]).content
    assert [top.bytes for top in content[0].top_logprobs] == [[0xF0], [0xF1], [0xF2], [0xF3], [0xF4]]


def test_candidates_that_look_alike_do_not_collapse_in_a_dict() -> None:
    """sglang#32290: a dict keyed by text had fewer entries than asked for."""
    alike = (
        Candidate(10, "\ufffd", b"\xf0", -0.1),
        Candidate(11, "\ufffd", b"\xf0\x9f", -0.2),
        Candidate(12, "A", b"A", -0.3),
        Candidate(13, "A", b"A", -0.4),
        Candidate(14, "A", b"A", -0.5),
        Candidate(15, "\ufffd", "\ufffd".encode(), -0.6),
    )
    (found,) = completion_logprobs([Scored(alike[0], "", alike)]).top_logprobs
    assert found == {"bytes:\\xf0": -0.1, "bytes:\\xf0\\x9f": -0.2, "A": -0.3, "bytes:\\x41": -0.4, "token_id:14": -0.5, "\ufffd": -0.6}


def test_the_chosen_token_is_in_the_dict_even_if_it_was_unlikely() -> None:
    top = (Candidate(1, "a", b"a", -0.1), Candidate(2, "b", b"b", -0.2))
    assert completion_logprobs([Scored(Candidate(3, "c", b"c", -9.0), "c", top)]).top_logprobs == [{"a": -0.1, "b": -0.2, "c": -9.0}]
    assert completion_logprobs([Scored(top[1], "b", top)]).top_logprobs == [{"a": -0.1, "b": -0.2}]
    assert completion_logprobs([plain("x")]).top_logprobs == [{"x": -1.0}]


def test_tokens_join_to_the_text_and_offsets_index_it() -> None:
    """vllm#5334: tokens and text_offset of an echo were growing strings; its first token has no log probability."""
    tokens = [plain("\n", first=True), plain("1"), plain(". Carol"), plain(" has é"), *shrug(), plain("!")]
    found = completion_logprobs(tokens)
    text = "".join(found.tokens)
    assert text == "\n1. Carol has é🤷!"
    assert found.text_offset == sorted(found.text_offset)
    for token, offset in zip(found.tokens, found.text_offset, strict=True):
        assert text[offset : offset + len(token)] == token
    assert found.token_logprobs[:2] == [None, -1.0]
    assert found.top_logprobs[0] is None


def test_the_impossible_is_sent_as_a_number() -> None:
    token = Scored(Candidate(1, "a", b"a", -INF), "a", (Candidate(2, "b", b"b", -INF),))
    assert chat_logprobs([token]).content[0].logprob == -9999.0
    assert chat_logprobs([token]).content[0].top_logprobs[0].logprob == -9999.0
    assert completion_logprobs([token]).token_logprobs == [-9999.0]
    assert completion_logprobs([token]).top_logprobs == [{"b": -9999.0, "a": -9999.0}]


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_json_made_piece_by_piece_is_that_of_the_whole(size: int) -> None:
    tokens = [plain("\n", first=True), plain(' "q"\u2028'), *shrug(), plain("!")]
    chat, completion = ChatScores(), CompletionScores(7)
    for start in range(0, len(tokens), size):
        chat.add(tokens[start : start + size])
        completion.add(tokens[start : start + size])
    assert chat.json() == json_value(chat_logprobs(tokens))
    assert completion.json() == json_value(completion_logprobs(tokens, 7))
    assert chat.n_tokens == completion.n_tokens == len(tokens)
