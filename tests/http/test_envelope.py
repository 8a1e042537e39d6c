"""A request as a gateway remembers it for another: equal to what was parsed, and without what nobody reads."""

import msgspec
import pytest

from relay.errors import InvalidRequest
from relay.http.envelope import Envelope, opened, refuse_long_scores
from relay.openai.chat import ChatRequest, parse_chat
from relay.openai.completion import CompletionRequest, parse_completion

RICH = {
    "n": 3,
    "temperature": 0.7,
    "top_p": 0.9,
    "seed": -5,
    "stop": ["a", "\u00e9\U0001f600"],
    "stop_token_ids": [7, 9],
    "logit_bias": {"5": -1.5, "77": 100},
    "stream": True,
    "stream_options": {"include_usage": True},
    "priority": 3,
    "cache_salt": "s",
    "metadata": {"nobody": "reads this" * 1000},
}
CHAT = {
    **RICH,
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "Be \u0000 brief."}]},
        {"role": "user", "name": "u", "content": "Hi"},
    ],
    "logprobs": True,
    "top_logprobs": 2,
    "chat_template_kwargs": {"deep": {"er": [1, 2.5, None, True, "x"]}, "large": 2**63},
}


def test_a_chat_request_comes_out_as_it_went_in() -> None:
    request = parse_chat(msgspec.json.encode(CHAT))
    packed = msgspec.json.encode(request)
    assert msgspec.json.decode(packed, type=ChatRequest) == request
    assert len(packed) < 2000


@pytest.mark.parametrize("prompt", ["text", [1, 2, 3], ["one", "two"], [[1, 2], [3]]])
def test_a_completion_request_comes_out_as_it_went_in(prompt: object) -> None:
    request = parse_completion(msgspec.json.encode({**RICH, "prompt": prompt, "echo": True, "logprobs": 4}))
    packed = msgspec.json.encode(request)
    assert msgspec.json.decode(packed, type=CompletionRequest) == request
    assert len(packed) < 2000


def test_an_envelope_is_sealed_with_who_may_open_it() -> None:
    envelope = Envelope(
        route="/v1/completions",
        request=b"{}",
        request_id="r1",
        public_id="mine",
        owner="alice",
        secret="",
        created=7,
        seed=1,
        deadline_ns=0,
    )
    resumable = envelope.resumable(1000)
    assert opened(resumable.envelope) == envelope
    assert (resumable.public_id, resumable.owner, resumable.secret, resumable.created) == ("mine", "alice", "", 7)


def test_more_log_probabilities_than_a_message_holds_are_refused_with_how_many_fit() -> None:
    refuse_long_scores(1_000_000, -1)
    refuse_long_scores(28_000, 20)
    with pytest.raises(InvalidRequest, match=r"may have 28339 tokens, and this one 131072"):
        refuse_long_scores(131_072, 20)
