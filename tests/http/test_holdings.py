"""What requests may take: refused before it is held, counted until it is let go."""

import contextlib
from typing import Any

import pytest

from relay.actors.gateway import Bell, Flight
from relay.errors import Overloaded, RateLimited, RequestTooLarge
from relay.http.holdings import Holdings, queued_bytes, request_bytes
from relay.ledger.ledger import Ledger
from relay.messages import Sampling, Stopping
from tests.running import RunningServer

MIB = 1 << 20


def flights(n: int = 1, *, n_prompt: int = 100, max_tokens: int = 100, prompt_logprobs: int = -1, **sampling: Any) -> list[Flight]:
    prompt = tuple(range(n_prompt))
    return [
        Flight(f"r{i}", prompt, Sampling(**sampling), Stopping(max_tokens=max_tokens), Ledger(0), Bell(), prompt_logprobs=prompt_logprobs)
        for i in range(n)
    ]


def holdings(**limits: int) -> Holdings:
    return Holdings(**{"max_request": 4 * MIB, "max_key": 6 * MIB, "max_all": 8 * MIB, "max_queue": 64 * MIB, **limits})


def test_log_probabilities_weigh_by_tokens_alternatives_and_choices() -> None:
    plain = request_bytes(flights(), whole=False)
    assert request_bytes(flights(logprobs=20), whole=False) > plain + 100 * 20 * 50
    assert request_bytes(flights(logprobs=20), whole=True) > request_bytes(flights(logprobs=20), whole=False)
    assert request_bytes(flights(prompt_logprobs=5), whole=False) > plain
    assert request_bytes(flights(8, logprobs=5), whole=True) > 7 * request_bytes(flights(logprobs=5), whole=True)


def test_a_prompt_weighs_once_and_its_copies_less() -> None:
    one, two = (request_bytes(flights(n, n_prompt=100_000), whole=False) for n in (1, 2))
    assert 1.1 * one < two < 1.5 * one


def test_what_is_too_much_for_one_request_one_key_or_all_is_refused_and_room_comes_back() -> None:
    some = holdings(max_key=4 * MIB)
    large = flights(logprobs=20, max_tokens=2000)  # 3.1 MiB
    with pytest.raises(RequestTooLarge, match="max_request_mib"), some.hold(None, flights(2, logprobs=20, max_tokens=2000), whole=False):
        pass
    assert some.n_bytes == 0
    with contextlib.ExitStack() as held:
        held.enter_context(some.hold("alice", large, whole=False))
        with pytest.raises(RateLimited), some.hold("alice", large, whole=False):
            pass
        held.enter_context(some.hold("bob", large, whole=False))
        with pytest.raises(Overloaded), some.hold("carol", large, whole=False):
            pass
        assert 0 < some.n_bytes <= 8 * MIB
    assert some.n_bytes == 0
    with some.hold("carol", large, whole=False):
        pass


def test_what_the_router_could_never_hold_is_told_so() -> None:
    some = holdings(max_queue=MIB)
    assert queued_bytes(flights(300)) > MIB
    with pytest.raises(RequestTooLarge, match="max_queue_mib"), some.hold(None, flights(300), whole=False):
        pass


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"prompt": "Hi", "n": 128, "logprobs": 20, "max_tokens": 4000}, "gateway.max_request_mib"),
        ({"prompt": [[504] * 8000] * 16, "n": 128, "max_tokens": 1}, "router.max_queue_mib"),
    ],
    ids=["log probabilities", "prompts times choices"],
)
def test_a_small_body_that_would_take_gigabytes_is_refused(server: RunningServer, body: dict[str, Any], says: str) -> None:
    response = server.http.post("/v1/completions", json=body)
    assert (response.status_code, response.json()["error"]["code"]) == (413, "request_too_large")
    assert says in response.json()["error"]["message"]
    page = server.http.get("/metrics").text
    for name in ("relay_gateway_held_bytes", "relay_router_queued_bytes", "relay_resumable_log_bytes"):
        assert any(line.startswith(name + "{") for line in page.splitlines()), name
