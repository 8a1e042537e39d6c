"""A lever moves the wall by what the ledger says of its span: one token's hop is waited for, and all steps are. Real processes."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.running import RunningServer, running

CONFIG = """
model: {source: "random:tiny-llama", name: tiny}
gateway: {bind: 127.0.0.1:0}
runtime: {allow_faults: true}
engine: {kv_memory_mib: 32, speculative_tokens: 0}
workers:
  - {name: prefill, roles: [prefill]}
  - {name: decode, roles: [decode]}
"""
N_TOKENS = 16
STEP_S, HOP_S = 0.05, 0.03  # so long each takes at least: what the machine adds is not looked at


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    path = tmp_path_factory.mktemp("config") / "lever.yaml"
    path.write_text(CONFIG)
    with running(path, tmp_path_factory.mktemp("lever")) as server:
        slow(server, "decode-0", "computed", STEP_S)
        yield server


def slow(server: RunningServer, worker: str, point: str, seconds: float) -> None:
    fault = {"worker": worker, "point": point, "action": "slow", "seconds": seconds}
    assert server.http.post("/admin/faults", json=fault).status_code == 202


@dataclass
class Told:
    """A ledger in seconds."""

    decode: float
    hop: float
    ttft_hop: float
    wall: float


def ask(server: RunningServer, *, stream: bool) -> Told:
    body = {"prompt": [7, 8, 9, 10], "max_tokens": N_TOKENS, "temperature": 0, "ignore_eos": True, "stream": stream}
    answer = server.http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    kept = server.http.get(f"/v1/requests/{answer.headers['x-request-id']}/ledger").json()
    spans, ttft = kept["spans"], kept["ttft_spans"]
    assert sum(spans.values()) == kept["wall_ns"]
    assert sum(ttft.values()) == kept["ttft_ns"]
    assert kept["violations"] == 0
    decode = sum(ns for span, ns in spans.items() if span.startswith("decode."))
    return Told(decode / 1e9, spans["hop"] / 1e9, ttft["hop"] / 1e9, kept["wall_ns"] / 1e9)


@pytest.mark.parametrize("stream", [False, True])
def test_a_slower_hop_is_charged_once_and_takes_nothing_from_the_steps(server: RunningServer, stream: bool) -> None:
    """The gateway needs 30 ms for each token, while the next step takes 50: the answer comes 30 ms later, and not 480."""
    steps = (N_TOKENS - 1) * STEP_S
    quick = ask(server, stream=stream)
    assert quick.decode >= steps
    slow(server, "gateway-0", "message:Tokens", HOP_S)
    try:
        told = [ask(server, stream=stream) for _ in range(3)]
    finally:
        slow(server, "gateway-0", "message:Tokens", 0)
    assert min(each.decode for each in told) >= steps
    assert min(each.hop for each in told) >= HOP_S
    assert min(each.hop for each in told) < N_TOKENS * HOP_S / 2
    assert min(each.ttft_hop for each in told) >= HOP_S


def test_a_slower_step_is_charged_each_time(server: RunningServer) -> None:
    """By what it is slower, to the steps, and nothing of it to the hop beside them."""
    before = ask(server, stream=True)
    slow(server, "decode-0", "computed", 2 * STEP_S)
    try:
        after = ask(server, stream=True)
    finally:
        slow(server, "decode-0", "computed", STEP_S)
    assert before.decode >= (N_TOKENS - 1) * STEP_S
    assert after.decode >= (N_TOKENS - 1) * 2 * STEP_S
    assert after.wall >= after.decode
