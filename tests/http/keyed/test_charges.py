"""What a key's streams cost it, whoever reads them; and what of a key is its own: streams, cached prefixes, priority."""

from typing import Any

import httpx

from tests.http.keyed.asking import generate, key, send
from tests.running import RunningServer, until

N_LONG = 400
BODY: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": N_LONG, "temperature": 0, "ignore_eos": True, "stream": True}


def open_and_leave(server: RunningServer, name: str, **headers: str) -> tuple[str, str]:
    """A resumable stream that its client leaves at once: its id, and that of the event that came."""
    headers = {"Authorization": f"Bearer {key(name)}", "X-Relay-Resume": "true", **headers}
    with httpx.stream("POST", f"{server.url}/v1/completions", headers=headers, json=BODY, timeout=300) as response:
        assert response.status_code == 200, response.read()
        last_id = next(line for line in response.iter_lines() if line.startswith("id: "))
        return response.headers["x-relay-resume"], last_id.removeprefix("id: ")


def resume(server: RunningServer, name: str, stream: str, last_id: str = "") -> httpx.Response:
    return send(server, name, "GET", f"/v1/requests/{stream}/stream", headers={"Last-Event-ID": last_id})


def tokens_left(server: RunningServer, name: str) -> tuple[int, int]:
    """Of its minute, before a request of one token that costs as many as the second number says."""
    response = generate(server, name)
    assert response.status_code == 200, response.text
    cost = response.json()["usage"]["total_tokens"]
    return int(response.headers["x-ratelimit-remaining-tokens"]) + cost, cost


def test_a_stream_that_its_client_left_counts_until_its_end_and_is_charged_whole(server: RunningServer) -> None:
    """28,486 tokens of such streams were computed, and 70 charged; 15 ran at once under a limit of one."""
    open_and_leave(server, "leaver")
    refused = generate(server, "leaver")
    assert refused.status_code == 429
    assert "1 requests running" in refused.json()["error"]["message"]
    until(lambda: send(server, "root", "GET", "/debug/kv").status_code == 200 and generate(server, "leaver").status_code == 200, 120)
    left, cost = tokens_left(server, "leaver")
    assert left == 100_000 - (cost - 1 + N_LONG) - cost


def test_a_stream_that_is_resumed_is_charged_once_and_needs_no_second_place(server: RunningServer) -> None:
    stream, last_id = open_and_leave(server, "returner")
    rest = resume(server, "returner", stream, last_id)
    assert rest.status_code == 200, rest.text
    assert rest.text.endswith("data: [DONE]\n\n")
    left, cost = tokens_left(server, "returner")
    assert left == 100_000 - (cost - 1 + N_LONG)
    assert resume(server, "returner", stream).text.endswith("data: [DONE]\n\n")  # told again, and computed no more
    assert tokens_left(server, "returner")[0] == left - cost


def test_a_stream_is_its_keys_by_any_name(server: RunningServer) -> None:
    stream, last_id = open_and_leave(server, "alice", **{"X-Request-ID": "the-same"})
    open_and_leave(server, "bob", **{"X-Request-ID": "the-same"})
    for name in (stream, "the-same"):
        assert resume(server, "urgent", name).json()["error"]["code"] == "stream_lost"
    rest = resume(server, "alice", "the-same", last_id)
    assert rest.headers["x-relay-resume"] == stream
    assert rest.text.endswith("data: [DONE]\n\n")


def test_a_key_finds_no_prefix_of_anothers(server: RunningServer) -> None:
    """A prompt of 600 tokens was answered in 15 instead of 250 ms where another key had sent it."""
    prompt = " ".join(f"word {i}" for i in range(100))

    def cached(name: str, **more: Any) -> int:
        n: int = generate(server, name, prompt=prompt, max_tokens=4, **more).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return n

    assert cached("alice") == 0
    until(lambda: cached("alice") > 0, 120)
    assert cached("bob") == 0
    assert cached("bob", cache_salt="alice") == 0


def test_a_priority_is_bounded_by_the_key(server: RunningServer) -> None:
    assert generate(server, "alice", priority=-1).json()["error"]["param"] == "priority"
    assert generate(server, "urgent", priority=-6).json()["error"]["param"] == "priority"
    assert [generate(server, name, priority=n).status_code for name, n in (("alice", 0), ("alice", 9), ("urgent", -5))] == [200] * 3
