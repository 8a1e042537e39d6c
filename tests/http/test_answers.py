"""The whole of both endpoints: choices, log probabilities, echo, batches, penalties, and conversations that hit the cache."""

import json
import math
from pathlib import Path
from typing import Any

import openai
import pytest

from relay.model.gguf_metadata import read_metadata
from relay.text.tokenizer import Tokenizer
from tests.running import RunningServer

MODEL = "smollm2"
LONG = "The old library at the end of the street had been closed for many years, and nobody in the town remembered why. " * 2


@pytest.fixture(scope="module")
def client(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def complete(server: RunningServer, **body: Any) -> dict[str, Any]:
    response = server.http.post("/v1/completions", json={"model": MODEL, "temperature": 0, "max_tokens": 4, **body})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def streamed(server: RunningServer, path: str, **body: Any) -> list[dict[str, Any]]:
    response = server.http.post(path, json={"model": MODEL, "temperature": 0, "max_tokens": 4, "stream": True, **body})
    assert response.status_code == 200, response.text
    parts = response.text.split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


def test_choices_are_distinct_whole_and_counted(client: openai.OpenAI) -> None:
    """vllm#16863, litellm#3276."""
    body: dict[str, Any] = {"model": MODEL, "prompt": "My favourite animal is", "max_tokens": 8, "temperature": 1.0, "n": 3, "seed": 1}
    whole = client.completions.create(**body)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert len({choice.text for choice in whole.choices}) == 3
    assert whole.usage is not None
    assert whole.usage.completion_tokens <= 24
    assert whole.usage.prompt_tokens == 4
    texts = ["", "", ""]
    for chunk in client.completions.create(**body, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in whole.choices]


def test_a_choice_is_what_it_would_be_alone(server: RunningServer) -> None:
    """Its random numbers depend on its seed, its number and the position, and on nothing else."""
    body = {"prompt": LONG, "temperature": 1.0, "seed": 9, "max_tokens": 6}
    three = complete(server, **body, n=3)
    one = complete(server, **body)
    assert three["choices"][0]["text"] == one["choices"][0]["text"]
    assert complete(server, **body, n=3)["choices"] == three["choices"]


def test_the_best_of_several_is_the_likeliest(server: RunningServer) -> None:
    body = {"prompt": "The capital of France is", "temperature": 1.0, "seed": 3, "max_tokens": 4}
    every = complete(server, **body, n=4, logprobs=0)["choices"]
    means = [sum(choice["logprobs"]["token_logprobs"]) / len(choice["logprobs"]["token_logprobs"]) for choice in every]
    best = complete(server, **body, n=1, best_of=4)
    assert best["choices"][0]["text"] == every[means.index(max(means))]["text"]
    assert best["choices"][0]["logprobs"] is None
    assert best["usage"]["completion_tokens"] == 16


def test_batched_prompts_answer_in_order(server: RunningServer) -> None:
    """vllm#1270, vllm#17524."""
    prompts = ["One, two,", "Red, green,", "A, B,"]
    batch = complete(server, prompt=prompts, n=2, temperature=0.8, seed=4)
    assert [choice["index"] for choice in batch["choices"]] == list(range(6))
    for i, prompt in enumerate(prompts):
        alone = complete(server, prompt=prompt, n=2, temperature=0.8, seed=4)
        assert [c["text"] for c in alone["choices"]] == [c["text"] for c in batch["choices"][2 * i : 2 * i + 2]]
    by_ids = complete(server, prompt=[[1, 2], [3]])
    assert by_ids["usage"]["prompt_tokens"] == 3


@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs_have_their_own_form(server: RunningServer, stream: bool) -> None:
    """vllm#3179, sglang#2825: streamed ones joined are the whole ones, the first token's too."""
    body = {"messages": [{"role": "user", "content": "Say hi"}], "logprobs": True, "top_logprobs": 2}
    if stream:
        events = streamed(server, "/v1/chat/completions", **body)
        content = [entry for event in events for entry in ((event["choices"][0]["logprobs"] or {}).get("content") or [])]
        text = "".join(event["choices"][0]["delta"].get("content") or "" for event in events)
    else:
        choice = server.http.post("/v1/chat/completions", json={"temperature": 0, "max_tokens": 4, **body}).json()["choices"][0]
        content, text = choice["logprobs"]["content"], choice["message"]["content"]
    assert len(content) >= 3
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == text
    for entry in content:
        assert len(entry["top_logprobs"]) == 2
        assert entry["logprob"] == entry["top_logprobs"][0]["logprob"]
        assert entry["logprob"] <= 0


@pytest.mark.parametrize(
    ("asked", "n_top"), [({"logprobs": False}, None), ({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 0}, 0), ({}, None)]
)
def test_logprobs_on_off_and_without_alternatives(server: RunningServer, asked: dict[str, Any], n_top: int | None) -> None:
    """vllm#5008."""
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "temperature": 0, **asked}
    logprobs = server.http.post("/v1/chat/completions", json=body).json()["choices"][0]["logprobs"]
    if n_top is None:
        assert logprobs is None
    else:
        assert [entry["top_logprobs"] for entry in logprobs["content"]] == [[]] * 2


def test_alternatives_without_logprobs_are_refused(server: RunningServer) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "top_logprobs": 3}
    assert server.http.post("/v1/chat/completions", json=body).status_code == 400


def test_emoji_alternatives_do_not_collapse(server: RunningServer) -> None:
    """sglang#32290: tokens that are parts of characters look alike as text."""
    top = complete(server, prompt="🤷🏽‍♀️🤷🏽‍♀️🤷🏽", max_tokens=3, logprobs=5)["choices"][0]["logprobs"]["top_logprobs"]
    assert all(len(each) >= 5 for each in top)


def test_logprobs_of_a_stopped_answer_cover_its_text_only(server: RunningServer) -> None:
    plain = complete(server, prompt="one, two, three, four,", max_tokens=10)["choices"][0]["text"]
    choice = complete(server, prompt="one, two, three, four,", max_tokens=10, logprobs=1, stop=[plain[6:9]])["choices"][0]
    assert choice["text"] == plain[:6]
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"]


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("prompt", ["\n1. Carol has 20", [19556, 905]])
@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_prompt_logprobs(server: RunningServer, max_tokens: int, prompt: Any, stream: bool) -> None:
    """vllm#6521, vllm#2706, vllm#5334, vllm#10234."""
    body = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": max_tokens, "top_k": 1, "temperature": 1}
    if stream:
        events = streamed(server, "/v1/completions", **body)
        text = "".join(event["choices"][0]["text"] for event in events)
        parts = [event["choices"][0]["logprobs"] for event in events if event["choices"][0]["logprobs"]]
        logprobs = {key: [item for part in parts for item in part[key]] for key in parts[0]}
    else:
        answer = complete(server, **body)
        text, logprobs = answer["choices"][0]["text"], answer["choices"][0]["logprobs"]
        assert answer["usage"]["completion_tokens"] == max_tokens
    if isinstance(prompt, str):
        assert text.startswith(prompt)
    assert "".join(logprobs["tokens"]) == text
    assert logprobs["token_logprobs"][0] is None
    assert all(value <= 0 for value in logprobs["token_logprobs"][1:])
    assert all(len(top) in (1, 2) for top in logprobs["top_logprobs"][1:])
    offsets = logprobs["text_offset"]
    assert offsets[0] == 0
    assert all(text[offset:].startswith(token) for offset, token in zip(offsets, logprobs["tokens"], strict=True))


def test_prompt_logprobs_do_not_depend_on_what_is_cached(server: RunningServer) -> None:
    """vllm#8268, vllm#42245."""
    body = {"echo": True, "logprobs": 0, "max_tokens": 1}
    first = complete(server, prompt=LONG + "first", **body)
    complete(server, prompt=LONG + "second")
    again = complete(server, prompt=LONG + "first", **body)
    assert again["choices"] == first["choices"]


def test_top_k_of_one_is_greedy_at_any_temperature(server: RunningServer) -> None:
    """vllm#2754, vllm#5404."""
    greedy = complete(server, prompt="Once upon a time", max_tokens=8)["choices"][0]["text"]
    assert complete(server, prompt="Once upon a time", max_tokens=8, temperature=5, top_k=1)["choices"][0]["text"] == greedy
    assert complete(server, prompt="Once upon a time", max_tokens=8, temperature=10, seed=1)["choices"][0]["text"] != greedy
    assert complete(server, prompt="Once upon a time", max_tokens=8, temperature=1, min_p=1.0)["choices"][0]["text"] == greedy


def test_penalties_and_biases_change_what_they_should(server: RunningServer, smollm2_path: Path) -> None:
    """vllm-metal#69: frequency and presence count what was generated, repetition the prompt too, from the first token on."""
    body = {"prompt": "red blue red blue red blue red blue red blue red", "max_tokens": 6}
    plain = complete(server, **body)["choices"][0]["text"]
    assert plain == " blue" * 6
    for penalty in ("frequency_penalty", "presence_penalty"):
        penalized = complete(server, **body, **{penalty: 2.0})["choices"][0]["text"]
        assert penalized.startswith(" blue")
        assert penalized != plain
    assert not complete(server, **body, repetition_penalty=5.0)["choices"][0]["text"].startswith(" blue")
    (token,) = Tokenizer.from_gguf(read_metadata(smollm2_path).metadata).encode(" blue")
    assert not complete(server, **body, logit_bias={str(token): -100})["choices"][0]["text"].startswith(" blue")
    assert complete(server, **body, logit_bias={str(token): 100})["choices"][0]["text"] == " blue" * 6


def test_a_conversation_hits_the_cache_and_answers_as_if_cold(server: RunningServer) -> None:
    messages = [{"role": "user", "content": "Tell me about rivers. " + LONG}]
    cached = []
    for turn in range(3):
        body = {"messages": messages, "max_tokens": 12, "temperature": 0}
        warm = server.http.post("/v1/chat/completions", json=body).json()
        cold = server.http.post("/v1/chat/completions", json={**body, "cache_salt": f"turn {turn}"}).json()
        assert warm["choices"] == cold["choices"]
        assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        cached.append(warm["usage"]["prompt_tokens_details"]["cached_tokens"])
        n_prompt = warm["usage"]["prompt_tokens"]
        assert cached[-1] < n_prompt
        messages += [
            {"role": "assistant", "content": warm["choices"][0]["message"]["content"]},
            {"role": "user", "content": f"Go on, {turn}."},
        ]
    assert cached[0] < cached[1] < cached[2]
    assert cached[1] >= 60


def test_the_decision_of_placement_is_on_record(server: RunningServer) -> None:
    response = server.http.post("/v1/completions", json={"prompt": LONG, "max_tokens": 2})
    ledger = server.http.get(f"/v1/requests/{response.headers['x-request-id']}/ledger").json()
    (decision,) = ledger["decisions"]
    assert decision["rule"] == "kv_aware"
    assert decision["prefill"][0]["worker"].startswith("prefill/0@")
    assert math.isfinite(decision["decode"][0]["score"])


def test_newer_names_of_fields_work(server: RunningServer) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 2, "ignore_eos": True}
    assert server.http.post("/v1/chat/completions", json=body).json()["usage"]["completion_tokens"] == 2


def test_special_tokens_can_be_shown(server: RunningServer) -> None:
    body = {"messages": [{"role": "user", "content": "Say only: ok"}], "max_tokens": 30, "temperature": 0, "ignore_eos": True}
    shown = server.http.post("/v1/chat/completions", json={**body, "skip_special_tokens": False}).json()["choices"][0]["message"]["content"]
    hidden = server.http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    assert "<|im_end|>" in shown
    assert "<|im_end|>" not in hidden


def test_an_assistants_message_can_be_continued(server: RunningServer) -> None:
    messages = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "one, two, three,"}]
    body = {"messages": messages, "max_tokens": 4, "temperature": 0, "continue_final_message": True, "add_generation_prompt": False}
    assert " four" in server.http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
