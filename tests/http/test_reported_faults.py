"""Kinds of faults that other servers were reported for, over real HTTP; `tests/reports.md` lists what covers which."""

import concurrent.futures
import json
import socket
from typing import Any
from urllib.parse import urlsplit

import pytest

from relay.model.gguf_metadata import read_metadata
from relay.text.tokenizer import Tokenizer
from tests.running import RunningServer

LONG = "In the year of the great flood the people of the valley built a wall of stone and clay along the river. " * 3


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Any) -> Tokenizer:
    return Tokenizer.from_gguf(read_metadata(smollm2_path).metadata)


def answer(server: RunningServer, **body: Any) -> dict[str, Any]:
    response = server.http.post("/v1/completions", json={"temperature": 0, "max_tokens": 8, **body})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def events(server: RunningServer, path: str = "/v1/completions", **body: Any) -> list[dict[str, Any]]:
    response = server.http.post(path, json={"temperature": 0, "max_tokens": 8, "stream": True, **body})
    assert response.status_code == 200, response.text
    parts = response.text.split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


def test_a_prompt_that_ends_within_a_character_is_not_sent_again(server: RunningServer, tokenizer: Tokenizer) -> None:
    """vllm#48853: the first event had the text of the whole prompt."""
    ids = tokenizer.encode("Hello 👨")
    cut, last = ids[:-1], ids[-1]
    assert tokenizer.decode([last]) == "\ufffd"
    finished: dict[str, Any] = {"prompt": cut, "max_tokens": 1, "logit_bias": {str(last): 100}}
    assert [event["choices"][0]["text"] for event in events(server, **finished)] == ["👨", ""]
    assert answer(server, **finished)["choices"][0]["text"] == "👨"
    free = "".join(event["choices"][0]["text"] for event in events(server, prompt=cut, max_tokens=6))
    assert free == answer(server, prompt=cut, max_tokens=6)["choices"][0]["text"]
    assert "Hello" not in free


def test_a_long_stop_string_sends_no_empty_events_and_delays_nothing(server: RunningServer) -> None:
    """vllm#11089."""
    body: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 50, "ignore_eos": True}
    texts = [event["choices"][0]["text"] for event in events(server, **body, stop=["x" * 200])]
    assert len(texts) > 10
    assert all(texts[:-1])
    assert texts[-1] == ""
    assert "".join(texts) == answer(server, **body)["choices"][0]["text"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_the_text_of_a_special_token_may_be_a_stop_string(server: RunningServer, path: str) -> None:
    """ai-dynamo/dynamo#3014: no answer at all."""
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Say only: ok"}]} if "chat" in path else {"prompt": "Say only: ok"}
    body |= {"max_tokens": 20, "temperature": 0}
    plain = server.http.post(path, json=body).json()["choices"]
    stopped = server.http.post(path, json={**body, "stop": ["<|im_end|>"]})
    assert stopped.status_code == 200
    assert stopped.json()["choices"] == plain
    shown = server.http.post(path, json={**body, "stop": ["<|im_end|>"], "skip_special_tokens": False, "ignore_eos": True})
    assert shown.json()["choices"][0]["finish_reason"] in ("stop", "length")
    assert "<|im_end|>" not in json.dumps(shown.json()["choices"])


def test_many_early_stops_leave_no_error_and_no_block(server: RunningServer) -> None:
    """ai-dynamo/dynamo#4945: each was logged as a broken pipe by its worker."""
    before = len(server.log())

    def stopped(n: int) -> str:
        choice = events(server, prompt=f"{n} times. The cat sat on", max_tokens=60, stop=["the", "."], ignore_eos=n % 2 == 0)[-1]["choices"]
        reason: str = choice[0]["finish_reason"]
        return reason

    with concurrent.futures.ThreadPoolExecutor(10) as pool:
        reasons = list(pool.map(stopped, range(60)))
    assert reasons.count("stop") > 50
    server.assert_blocks_come_back()
    logged = server.log()[before:]
    assert '"level": "error"' not in logged
    assert '"level": "warning"' not in logged
    assert "ended:" not in logged


def test_prompts_are_batched_in_a_stream_too(server: RunningServer) -> None:
    """vllm#1270; litellm#3276: usage counts each prompt once."""
    prompts = ["One, two,", [28, 29], "Red, green,"]
    with pytest.raises(AssertionError):
        events(server, prompt=prompts)  # strings and ids are not mixed
    prompts = ["One, two,", "Red, green,"]
    whole = answer(server, prompt=prompts, n=2, temperature=0.9, seed=3)
    streamed = events(server, prompt=prompts, n=2, temperature=0.9, seed=3, stream_options={"include_usage": True})
    texts = ["", "", "", ""]
    reasons: list[list[str]] = [[], [], [], []]
    for event in streamed[:-1]:
        choice = event["choices"][0]
        texts[choice["index"]] += choice["text"]
        reasons[choice["index"]] += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert texts == [choice["text"] for choice in whole["choices"]]
    assert reasons == [[choice["finish_reason"]] for choice in whole["choices"]]
    assert streamed[-1]["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]
    assert streamed[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]


def test_seeds_decide_whatever_else_runs_and_in_whatever_order(server: RunningServer) -> None:
    """vllm#51226 (a batch mate without a seed), vllm#17524 (another order)."""

    def ask(seed: int | None) -> tuple[int | None, str]:
        body = {"prompt": "My favourite thing is", "max_tokens": 12, "temperature": 1.0, "ignore_eos": True}
        return seed, answer(server, **body, seed=seed)["choices"][0]["text"]

    alone = dict(ask(seed) for seed in range(8))
    assert len({*alone.values()}) > 4
    orders: list[list[int | None]] = [[0, None, 1, 2, None, 3, 4, 5, None, 6, 7], [7, 6, None, 5, 4, 3, None, None, 2, 1, 0]]
    with concurrent.futures.ThreadPoolExecutor(11) as pool:
        for order in orders:
            for seed, text in pool.map(ask, order):
                assert seed is None or text == alone[seed]


def test_prompt_logprobs_do_not_depend_on_who_came_first(server: RunningServer) -> None:
    """vllm#42245: two prompts with a common beginning, in both orders."""

    def scores(ending: str, salt: str) -> dict[str, Any]:
        found: dict[str, Any] = answer(server, prompt=LONG + ending, echo=True, logprobs=2, max_tokens=1, cache_salt=salt)["choices"][0]
        return found

    first = [scores("A king", "one"), scores("The snow", "one")]
    second = [scores("The snow", "two"), scores("A king", "two")]
    assert first == second[::-1]


@pytest.mark.parametrize("n_tokens", [32, 48])
def test_a_prompt_of_whole_blocks_that_is_all_cached_answers_as_before(server: RunningServer, n_tokens: int) -> None:
    """GeeeekExplorer/nano-vllm#144: nothing was left to compute."""
    prompt = list(range(1000, 1000 + n_tokens))
    cold = answer(server, prompt=prompt, cache_salt=f"whole {n_tokens}")
    warm = answer(server, prompt=prompt, cache_salt=f"whole {n_tokens}")
    assert warm["choices"] == cold["choices"]
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert 0 < warm["usage"]["prompt_tokens_details"]["cached_tokens"] < n_tokens


@pytest.mark.parametrize("prompt", ["word " * 20_000, [5] * 8193, [7] * 1_000_000], ids=["text", "ids", "a million ids"])
def test_an_overlong_prompt_is_refused_while_a_stream_goes_on(server: RunningServer, prompt: Any) -> None:
    """vllm#13067: it took the service down."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        stream = pool.submit(
            events, server, prompt="Once upon a time", max_tokens=40, ignore_eos=True, stream_options={"include_usage": True}
        )
        response = server.http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1})
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "context_length_exceeded"
        assert stream.result()[-1]["usage"]["completion_tokens"] == 40


@pytest.mark.parametrize("given", [0, -1, 10**9, 1e9, "5", 2.5, True])
def test_a_number_of_tokens_that_cannot_be_is_refused(server: RunningServer, given: Any) -> None:
    """vllm#6707."""
    for path, body in (("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})):
        for field in ("max_tokens", "max_completion_tokens"):
            response = server.http.post(path, json={**body, field: given})
            assert response.status_code == 400
            assert "tokens" in response.json()["error"]["param"]


def test_of_two_requests_with_one_id_only_the_one_whose_client_leaves_ends(server: RunningServer) -> None:
    """vllm#15041."""
    parts = urlsplit(server.url)
    body = json.dumps({"prompt": "A long story:", "max_tokens": 3000, "stream": True, "ignore_eos": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Request-ID: same\r\nContent-Length: %d\r\n\r\n" % len(body)
    with socket.create_connection((parts.hostname, parts.port), timeout=300) as leaving, concurrent.futures.ThreadPoolExecutor(1) as pool:
        leaving.sendall(head + body)
        while b"data: " not in leaving.recv(65536):
            pass
        headers = {"X-Request-ID": "same"}
        whole = {"prompt": "Once upon a time", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
        stays = pool.submit(server.http.post, "/v1/completions", json=whole, headers=headers)
        leaving.close()
        assert stays.result().json()["usage"]["completion_tokens"] == 40
    server.assert_blocks_come_back()
    assert stays.result().json()["choices"] == answer(server, **whole)["choices"]


def test_the_last_id_of_the_vocabulary_is_a_prompt_and_the_next_is_none(server: RunningServer) -> None:
    """vllm#9634."""
    assert answer(server, prompt=[49151], max_tokens=1)["usage"]["prompt_tokens"] == 1
    assert server.http.post("/v1/completions", json={"prompt": [49152], "max_tokens": 1}).status_code == 400


def test_empty_prompts_are_refused_and_empty_messages_answered(server: RunningServer) -> None:
    """vllm#7283 and llama.cpp#5246: a tokenizer that adds nothing makes no token of them. A chat's template always makes some."""
    empty: list[Any] = ["", [""], [], [[]], ["a", ""]]
    for prompt in empty:
        assert server.http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 2}).status_code == 400
    chat = {"messages": [{"role": "user", "content": ""}], "max_tokens": 2}
    assert server.http.post("/v1/chat/completions", json=chat).json()["usage"]["prompt_tokens"] > 10
    assert answer(server, prompt="x", max_tokens=2)["usage"]["completion_tokens"] == 2


def test_a_clients_id_is_in_the_header_alone(server: RunningServer) -> None:
    """vllm#10968: an ID of a megabyte came back in every event."""
    body = {"prompt": "x", "max_tokens": 4, "stream": True}
    response = server.http.post("/v1/completions", json=body, headers={"X-Request-ID": "a-clients-own"})
    assert response.headers.get_list("x-request-id") == ["a-clients-own"]
    assert "a-clients-own" not in response.text
    for bad in ("y" * 10_240, "a b", "a%0d%0aSet-Cookie: z"):
        response = server.http.post("/v1/completions", json=body, headers={"X-Request-ID": bad})
        assert response.status_code == 200
        assert bad not in (response.headers["x-request-id"], response.text)
        assert "set-cookie" not in response.headers


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_an_overflow_is_told_in_words_that_clients_act_on(server: RunningServer, path: str) -> None:
    """LiteLLM look for the second phrase, LangChain for the first; else no history is trimmed, no fallback begun."""
    prompt = "word " * 9000
    ask = {"prompt": prompt} if path == "/v1/completions" else {"messages": [{"role": "user", "content": prompt}]}
    for body in (ask, {"prompt": "x" * 4_000_000, "messages": [{"role": "user", "content": "x" * 4_000_000}]}):
        response = server.http.post(path, json=body)
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
        assert "prompt is too long" in error["message"]
        assert "this model's maximum context length is 8192 tokens" in error["message"]
    short = {"prompt": "Hi"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "Hi"}]}
    error = server.http.post(path, json={**short, "max_tokens": 9000}).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "max_tokens")
    assert "this model's maximum context length is 8192 tokens" in error["message"]


def test_a_completion_without_a_number_of_tokens_has_sixteen(server: RunningServer) -> None:
    """As OpenAI and vLLM have it: without, the first request of a newcomer ran through the whole context."""
    response = server.http.post("/v1/completions", json={"prompt": "1, 2, 3,", "temperature": 0, "ignore_eos": True})
    assert response.json()["usage"]["completion_tokens"] == 16
    response = server.http.post("/v1/completions", json={"prompt": "1, 2, 3,", "temperature": 0, "ignore_eos": True, "min_tokens": 20})
    assert response.json()["usage"]["completion_tokens"] == 20


@pytest.mark.parametrize("least", [1, 20, 45])
@pytest.mark.parametrize("stop", [" the", "a"])
def test_stop_strings_wait_for_the_least_number_of_tokens(server: RunningServer, stop: str, least: int) -> None:
    """vllm#21987."""
    body: dict[str, Any] = {"prompt": "Once upon a time", "stop": [stop], "min_tokens": least, "max_tokens": 60}
    whole = answer(server, **body)
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert whole["usage"]["completion_tokens"] >= least
    streamed = events(server, **body)
    assert "".join(event["choices"][0]["text"] for event in streamed) == whole["choices"][0]["text"]
    assert streamed[-1]["choices"][0]["finish_reason"] == "stop"
