"""Damaged request bodies against a real server: what must never come back is a 5xx, a hang or a dead worker."""

import json
import random
from collections import Counter
from pathlib import Path

import httpx

from tests.openai.test_malformed import BEYOND_MODEL, BOTH, BYTES, CHAT, COMPLETION, ONLY_CHAT, ONLY_COMPLETION

ROUTES = {"chat": "/v1/chat/completions", "completion": "/v1/completions"}
PIECES = [b'"', b"[", b"{", b"}", b"\\ud83d", b"\\", b"-", b"e9", b"null", b"\xff", b"0", b",", b":", b"true", b"1e400"]


def malformed() -> list[tuple[str, bytes]]:
    """(route, body) of everything that the tables of the parsers' tests know to be wrong."""
    rows = [(route, body) for route in ROUTES.values() for _, body, _, _ in BYTES]
    for base, changes in ((CHAT, BOTH + ONLY_CHAT), (COMPLETION, BOTH + ONLY_COMPLETION + BEYOND_MODEL)):
        route = ROUTES["chat" if base is CHAT else "completion"]
        rows += [(route, json.dumps(base | change).encode()) for change, *_ in changes]
    return rows


def damaged(seed: int) -> tuple[str, bytes]:
    """A body that was sound, or nearly, with bytes cut out, put in and overwritten."""
    pick = random.Random(seed)
    route, base, changes = pick.choice(
        [
            (ROUTES["chat"], CHAT, BOTH + ONLY_CHAT),
            (ROUTES["completion"], COMPLETION, BOTH + ONLY_COMPLETION),
        ]
    )
    change = pick.choice(changes)[0] if pick.random() < 0.6 else {}
    body = json.dumps(base | change).encode()
    for _ in range(pick.randint(1, 4)):
        at = pick.randrange(len(body) + 1)
        put = pick.choice(PIECES) if pick.random() < 0.7 else pick.randbytes(pick.randint(0, 3))
        body = body[:at] + put + body[at + pick.randint(0, 3) :]
    return route, body


def send(client: httpx.Client, route: str, body: bytes) -> int:
    """The status; asserts that it is no fault of the server's and has a body that says what was wrong."""
    response = client.post(route, content=body, timeout=60)
    assert response.status_code < 500, (response.status_code, response.text, body[:2000])
    assert response.headers["x-request-id"]
    if response.status_code != 200:
        error = response.json()["error"]
        assert error["message"], body[:2000]
        assert error["type"]
    return response.status_code


def small_config(source: Path, target: Path) -> Path:
    """A config whose requests cannot be long, whatever they ask for, and whose streams are never silent for long."""
    text = source.read_text().replace("  name: smollm2\n", "  name: smollm2\n  max_context: 64\n")
    target.write_text(
        text.replace("  bind: 127.0.0.1:8000\n", "  bind: 127.0.0.1:8000\n  default_max_tokens: 2\n  keepalive_comment_s: 0.01\n")
    )
    return target


def fuzz(client: httpx.Client, seeds: range) -> Counter[int]:
    """Statuses by count."""
    return Counter(send(client, *damaged(seed)) for seed in seeds)
