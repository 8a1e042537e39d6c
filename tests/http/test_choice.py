"""One choice of an answer: its text and the log probabilities of its tokens are the same thing said twice."""

from itertools import chain
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relay.actors.gateway import Bell, Flight
from relay.http.choice import Choice, echoed
from relay.ledger.ledger import Ledger
from relay.messages import Logprobs, Sampling, Stopping
from relay.model.gguf_metadata import read_metadata
from relay.model.random_models import make_folder
from relay.model.text_files import read_text_files
from relay.openai.logprob import Scored
from relay.text.stop import StopStrings
from relay.text.tokenizer import Tokenizer

LIKELY = Logprobs(-0.5, (), ())


@pytest.fixture(autouse=True)
def _law_of_blocks() -> None:
    """No server, no blocks."""


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Tokenizer:
    return Tokenizer.from_gguf(read_metadata(smollm2_path).metadata)


def flight(prompt: list[int], ids: list[int]) -> Flight:
    """One that has ended."""
    found = Flight("r", tuple(prompt), Sampling(), Stopping(max_tokens=len(ids) or 1), Ledger(0), Bell())
    found.ids, found.logprobs, found.finish = list(ids), [LIKELY] * len(ids), "length"
    return found


def pumped(tokenizer: Tokenizer, ids: list[int], stops: tuple[str, ...], cuts: list[int]) -> tuple[str, list[Scored]]:
    """As its tokens come in, some at a time."""
    whole = flight([19556], ids)
    growing = flight([19556], [])
    growing.finish = None
    choice = Choice(0, growing, tokenizer, stops=StopStrings(stops), include_stop=False, skip_special=True, with_logprobs=True)
    texts, tokens = [], []
    for end in (*sorted(cuts), len(ids)):
        growing.ids, growing.logprobs = whole.ids[:end], whole.logprobs[:end]
        growing.finish = "length" if end == len(ids) else None
        text, scored = choice.pump()
        texts.append(text)
        tokens += scored
        while choice.is_behind:
            text, scored = choice.pump()
            texts.append(text)
            tokens += scored
        if choice.finish is not None:
            break
    return "".join(texts), tokens


def test_an_answer_cut_within_a_character_shows_that_in_its_last_token(tokenizer: Tokenizer) -> None:
    """vllm#5334's kind: the tokens of an answer join to its text, the replacement of an unfinished character too."""
    ids = tokenizer.encode("Look: 👨")[:-1]
    text, tokens = pumped(tokenizer, ids, (), [])
    assert text == "Look: \ufffd"
    assert [token.piece for token in tokens] == ["Look", ":", " ", "\ufffd"]
    assert pumped(tokenizer, ids, (), list(range(len(ids)))) == (text, tokens)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_tokens_join_to_the_text_however_they_come(tokenizer: Tokenizer, data: st.DataObject) -> None:
    fragments = [i for i, text in enumerate(tokenizer.tables(False)[0]) if text is None]
    ids = data.draw(st.lists(st.one_of(st.sampled_from(fragments), st.integers(30, 90), st.integers(0, 49151)), min_size=1, max_size=16))
    stops = data.draw(st.sampled_from([(), ("zzz",), ("a",), ("\ufffd",), ("e", "th")]))
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=4))
    text, tokens = pumped(tokenizer, ids, stops, cuts)
    assert "".join(token.piece for token in tokens) == text
    assert (text, tokens) == pumped(tokenizer, ids, stops, [])


def test_an_echo_shows_the_clients_text_and_scores_what_was_put_in_front_of_it(tmp_path: Path) -> None:
    """A model that begins every prompt with a token of its own: it has no text unless the client spelled it."""
    tokenizer, _ = read_text_files(make_folder("tiny-llama", tmp_path))
    ids = tokenizer.encode_prompt("Hi")
    assert len(ids) == 3
    assert tokenizer.n_added("Hi") == 1
    scored = flight(ids, [])
    scored.scores = [LIKELY, LIKELY]
    tokens = list(chain.from_iterable(echoed(tokenizer, scored, tokenizer.n_added("Hi"))))
    assert [(token.piece, token.first) for token in tokens] == [("", True), ("H", False), ("i", False)]
    spelled = tokenizer.token_bytes(ids[0]).decode() + "Hi"
    assert tokenizer.encode_prompt(spelled) == ids
    assert tokenizer.n_added(spelled) == 0
    assert [token.piece for token in chain.from_iterable(echoed(tokenizer, scored, 0))] == [spelled[:-2], "H", "i"]
