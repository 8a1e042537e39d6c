"""Damaged request bodies against a real server: what must never come back is a 5xx, a hang or a dead worker."""

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.openai.test_malformed import BEYOND_MODEL, BOTH, BYTES, CHAT, COMPLETION, ONLY_CHAT, ONLY_COMPLETION

ROUTES = {"chat": "/v1/chat/completions", "completion": "/v1/completions"}
PIECES = [b'"', b"[", b"{", b"}", b"\\ud83d", b"\\", b"-", b"e9", b"null", b"\xff", b"0", b",", b":", b"true", b"1e400"]
USUAL: dict[str, list[Any]] = {
    "stream": [True, False],
    "max_tokens": [1, 2, 5, 30],
    "max_completion_tokens": [1, 4],
    "min_tokens": [0, 1, 2],
    "ignore_eos": [True],
    "stop": ["e", ["a", "\n"], ["<|end|>"], "\ufffd"],
    "stop_token_ids": [[2], [5, 6]],
    "include_stop_str_in_output": [True],
    "skip_special_tokens": [False],
    "temperature": [0, 0.5, 1, 100],
    "top_p": [0.1, 1, 1e-9],
    "top_k": [-1, 0, 1, 10**6],
    "min_p": [0, 0.3, 1],
    "seed": [0, -1, 2**63 - 1],
    "n": [1, 2, 3],
    "best_of": [1, 2, 4],
    "repetition_penalty": [0.1, 1.5, 10],
    "frequency_penalty": [-2, 2],
    "presence_penalty": [-2, 2],
    "logit_bias": [{"5": -100}, {"5": 100, "7": 100}, {}],
    "priority": [-(2**31), 0, 7],
    "cache_salt": ["", "x", "m"],
    "logprobs": [True, False, 0, 3, 20],
    "top_logprobs": [0, 2, 20],
    "echo": [True],
    "prompt": ["a", "é👨‍👩‍👧", ["a", "b"], [[1, 2], [3]], [5] * 62, "\x00"],
    "messages": [[{"role": "user", "content": ""}], [{"role": "system", "content": "s"}, {"role": "assistant", "content": "a"}]],
    "stream_options": [{}, {"include_usage": True}, {"continuous_usage_stats": True}],
}
ODD: list[Any] = [
    None,
    True,
    0,
    1,
    -1,
    2**31,
    2**64,
    0.5,
    -0.0,
    1e308,
    "",
    "a",
    "\x00",
    "٣",
    [],
    [1],
    [[]],
    ["a"],
    {},
    {"5": 1},
    {"": {}},
    [None],
]


def malformed() -> list[tuple[str, bytes]]:
    """(route, body) of everything that the tables of the parsers' tests know to be wrong."""
    rows = [(route, body) for route in ROUTES.values() for _, body, _, _ in BYTES]
    for base, changes in ((CHAT, BOTH + ONLY_CHAT), (COMPLETION, BOTH + ONLY_COMPLETION + BEYOND_MODEL)):
        route = ROUTES["chat" if base is CHAT else "completion"]
        rows += [(route, json.dumps(base | change).encode()) for change, *_ in changes]
    return rows


def damaged(seed: int) -> tuple[str, bytes]:
    """A body that was sound, or nearly: other values in some of its fields, or bytes cut out, put in and overwritten."""
    pick = random.Random(seed)
    route, base, changes = pick.choice(
        [
            (ROUTES["chat"], CHAT, BOTH + ONLY_CHAT),
            (ROUTES["completion"], COMPLETION, BOTH + ONLY_COMPLETION),
        ]
    )
    if pick.random() < 0.5:
        fields = sorted({key for change, *_ in changes for key in change} - {"model"})
        fields = [field for field in fields if field in USUAL] if pick.random() < 0.8 else fields
        return route, json.dumps(base | {field: _value(pick, field) for field in pick.choices(fields, k=pick.randint(1, 3))}).encode()
    change = pick.choice(changes)[0] if pick.random() < 0.6 else {}
    body = json.dumps(base | change).encode()
    for _ in range(pick.randint(1, 4)):
        at = pick.randrange(len(body) + 1)
        put = pick.choice(PIECES) if pick.random() < 0.7 else pick.randbytes(pick.randint(0, 3))
        body = body[:at] + put + body[at + pick.randint(0, 3) :]
    return route, body


def _value(pick: random.Random, field: str) -> Any:
    """Often one that the field may have."""
    if pick.random() < 0.9 and field in USUAL:
        return pick.choice(USUAL[field])
    if field == "prompt" and pick.random() < 0.7:
        return [pick.randrange(320) for _ in range(pick.randint(1, 70))]
    return pick.choice(ODD)


def send(client: httpx.Client, route: str, body: bytes) -> int:
    """The status; asserts that it is no fault of the server's and has a body that says what was wrong."""
    response = client.post(route, content=body, timeout=300)
    assert response.status_code < 500, (response.status_code, response.text, body[:2000])
    assert response.headers["x-request-id"]
    if response.headers["content-type"].startswith("text/event-stream"):
        assert response.text.endswith("data: [DONE]\n\n"), (response.text[-500:], body[:2000])
    elif response.status_code == 200:
        assert all(choice["finish_reason"] for choice in response.json()["choices"]), body[:2000]
    else:
        error = response.json()["error"]
        assert error["message"], body[:2000]
        assert error["type"]
    return response.status_code


def small_config(source: Path, target: Path, model: str | None = None) -> Path:
    """A config whose requests cannot be long, whatever they ask for, and whose streams are never silent for long.

    The model has the name that sound bodies ask for, so that those are served. model: another source.
    """
    config = yaml.safe_load(source.read_text())
    config["model"] |= {"name": CHAT["model"], "max_context": 64}
    if model is not None:
        config["model"] = {"source": model, "name": CHAT["model"], "max_context": 64}
    config["gateway"] |= {"default_max_tokens": 2, "keepalive_comment_s": 0.01}
    target.write_text(yaml.safe_dump(config))
    return target


def fuzz(client: httpx.Client, seeds: range) -> Counter[int]:
    """Statuses by count."""
    return Counter(send(client, *damaged(seed)) for seed in seeds)
