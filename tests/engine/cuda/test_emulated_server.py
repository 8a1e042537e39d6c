"""The whole server on emulated devices: prefill and decode in processes of their own, pools reached by handles; the same ids throughout."""

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from relay.engine.reference_runner import ReferenceRunner
from relay.engine.runner import Batch, Draw
from relay.kv.memory import KVMemory
from relay.messages import Sampling
from relay.model.load import open_checkpoint
from relay.model.source import resolve
from relay.model.weights import unpack
from tests.engine.cuda.models import device_layout
from tests.running import ROOT, RunningServer, running, until

MODEL = "random:tiny-llama-64"
CONFIG = """
model: {source: "random:tiny-llama-64", name: tiny, max_context: 512}
engine: {kv_memory_mib: 2, max_running: 4, max_chunk_tokens: 64}
runtime: {allow_faults: true, hang_s: 30, silent_s: 30, ready_within_s: 600}
workers:
"""
DISAGGREGATED = "  - {name: prefill, roles: [prefill], device: emulated}\n  - {name: decode, roles: [decode], device: emulated}\n"
AGGREGATED = "  - {name: engine, roles: [prefill, decode], device: emulated}\n"
SPECIALS = (b"<|begin|>", b"<|end|>", b"<|system|>", b"<|user|>", b"<|assistant|>")  # ids from 256 on
MARGIN = 0.1
N_NEW = 10


def prompt(n: int) -> list[int]:
    found: list[int] = np.random.default_rng(n).integers(0, 256, n).tolist()
    return found


BODIES: list[dict[str, Any]] = [
    {"prompt": prompt(40), "temperature": 0},
    {"prompt": prompt(17), "temperature": 0.9, "top_p": 0.9, "seed": 7},
    {"prompt": prompt(70), "temperature": 0, "frequency_penalty": 0.7, "presence_penalty": 0.2},
]


@pytest.fixture(scope="module")
def disaggregated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    yield from serve(DISAGGREGATED, tmp_path_factory.mktemp("disaggregated"))


@pytest.fixture(scope="module")
def alone(disaggregated: RunningServer) -> list[dict[str, Any]]:
    return [ask(disaggregated, body) for body in BODIES]


def serve(workers: str, folder: Path) -> Iterator[RunningServer]:
    config = folder / "config.yaml"
    config.write_text(CONFIG + workers)
    with running(config, folder / "run") as server:
        yield server


def ask(server: RunningServer, body: dict[str, Any]) -> dict[str, Any]:
    """The choice: text, tokens and log probabilities. Its ledger says whether its bits are the same in any batch."""
    answer = server.http.post("/v1/completions", json={"model": "tiny", "max_tokens": N_NEW, "logprobs": 1, **body})
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    assert len(choice["logprobs"]["tokens"]) == N_NEW
    record = server.http.get(f"/v1/requests/{answer.headers['x-request-id']}/ledger").json()
    assert record["exact"] is True
    return choice


def ask_at_once(server: RunningServer, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    answers: dict[int, dict[str, Any]] = {}

    def run(number: int) -> None:
        answers[number] = ask(server, bodies[number])

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [answers[i] for i in range(len(bodies))]


def id_of(text: bytes) -> int:
    """The tokenizer of random models has a token for each byte, some special ones, and numbers."""
    if len(text) == 1:
        return text[0]
    return 256 + SPECIALS.index(text) if text in SPECIALS else int(text.strip(b"<>"))


def test_greedy_ids_are_the_references_where_its_margin_is_clear(disaggregated: RunningServer) -> None:
    """Each id against what the reference, with the same weights and KV type, says after the same tokens."""
    content = "Which token follows?"
    body = {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": N_NEW, "temperature": 0, "logprobs": True}
    answer = disaggregated.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    ids = [id_of(bytes(token["bytes"])) for token in answer.json()["choices"][0]["logprobs"]["content"]]
    tokens = [256, 259, *content.encode(), 257, 260]
    assert answer.json()["usage"]["prompt_tokens"] == len(tokens)
    every = [*tokens, *ids]
    checkpoint = open_checkpoint(resolve(MODEL, sha256=None))
    n, rows = len(every), np.arange(len(every), dtype=np.int32)
    reference = ReferenceRunner(KVMemory(device_layout(checkpoint.spec, 8)), unpack(checkpoint), keep_logits=True)
    draws = tuple(Draw(Sampling(temperature=0.0), 0.0, every[: i + 1], n) for i in range(n))
    table = np.arange(-(-n // 16), dtype=np.int32)[None]
    logits = reference.step(Batch(np.asarray(every, np.int32), rows, np.zeros(n, np.int32), table, rows, draws)).logits
    assert logits is not None
    best = np.sort(logits, axis=1)
    clear = [i for i in range(N_NEW) if best[len(tokens) - 1 + i, -1] - best[len(tokens) - 1 + i, -2] >= MARGIN]
    assert len(clear) >= N_NEW // 2
    assert [ids[i] for i in clear] == [int(logits[len(tokens) - 1 + i].argmax()) for i in clear]


def test_batch_mates_leave_no_trace(disaggregated: RunningServer, alone: list[dict[str, Any]]) -> None:
    assert ask_at_once(disaggregated, BODIES) == alone
    disaggregated.assert_blocks_come_back()


def test_a_killed_decode_worker_leaves_no_trace(disaggregated: RunningServer, alone: list[dict[str, Any]]) -> None:
    """Its pool was device memory of its own: what peers still mapped is closed, and its next life is reached by a new handle."""
    before = disaggregated.pids()["decode-0"]
    fault = {"worker": "decode-0", "point": "step", "action": "kill", "after": 4}
    assert disaggregated.http.post("/admin/faults", content=msgspec.json.encode(fault)).status_code == 202
    assert ask(disaggregated, BODIES[2]) == alone[2]
    until(lambda: disaggregated.pids()["decode-0"] != before, 120, disaggregated.log)
    disaggregated.assert_blocks_come_back()
    assert ask(disaggregated, BODIES[2]) == alone[2]
    disaggregated.assert_blocks_come_back()


@pytest.mark.parametrize(
    ("worker", "action", "words"),
    [
        ("decode-0", "lose", "EngineDied: DeviceLost: CUDA error: the device is lost (emulated)"),
        ("decode-0", "exhaust", "EngineDied: OutOfMemoryError: CUDA out of memory (emulated)"),
        ("prefill-0", "exhaust", "EngineDied: OutOfMemoryError: CUDA out of memory (emulated)"),
    ],
)
def test_a_device_that_fails_in_a_step_ends_its_worker_and_the_stream_goes_on(
    disaggregated: RunningServer, alone: list[dict[str, Any]], worker: str, action: str, words: str
) -> None:
    before, log = disaggregated.pids()[worker], len(disaggregated.log())
    fault = {"worker": worker, "point": "step", "action": action, "after": 4 if worker == "decode-0" else 1}
    assert disaggregated.http.post("/admin/faults", content=msgspec.json.encode(fault)).status_code == 202
    assert ask(disaggregated, {**BODIES[2], "cache_salt": f"{worker} {action}"}) == alone[2]
    until(lambda: disaggregated.pids()[worker] != before, 120, disaggregated.log)
    assert f"{worker} ended: {words}" in " ".join(disaggregated.log()[log:].split())
    disaggregated.assert_blocks_come_back()
    assert ask(disaggregated, BODIES[2]) == alone[2]


def test_a_device_without_room_at_the_start_is_refused_with_what_to_lower(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG.replace("max_chunk_tokens: 64", f"max_chunk_tokens: {10**15}") + AGGREGATED)
    command = [sys.executable, "-m", "relay", "serve", str(config), "--bind", "127.0.0.1:0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=100)
    assert done.returncode == 1
    refusal = done.stdout.splitlines()[-1]
    assert re.match(
        r"relay: worker engine-0 cannot start: the device has no memory left for what this worker takes \(.*allocate memory", refusal
    )
    assert "lower engine.kv_memory_mib or engine.gpu_memory_share, engine.max_running, engine.max_chunk_tokens" in refusal


def test_a_bit_that_flips_on_the_way_is_found_and_the_prompt_computed_again(
    disaggregated: RunningServer, alone: list[dict[str, Any]]
) -> None:
    fault = {"worker": "prefill-0", "point": "step", "action": "corrupt"}
    assert disaggregated.http.post("/admin/faults", content=msgspec.json.encode(fault)).status_code == 202
    assert ask(disaggregated, {**BODIES[0], "cache_salt": "fresh"}) == alone[0]
    disaggregated.assert_blocks_come_back()


def test_without_peer_access_everything_goes_through_the_host_and_nothing_shows_it(tmp_path: Path, alone: list[dict[str, Any]]) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG.replace("max_running: 4", "max_running: 4, peer_access: false") + DISAGGREGATED)
    with running(config, tmp_path / "run") as server:
        assert "KV goes through pinned memory of the host" in server.log()
        assert ask_at_once(server, BODIES) == alone
        fault = {"worker": "prefill-0", "point": "step", "action": "corrupt"}
        assert server.http.post("/admin/faults", content=msgspec.json.encode(fault)).status_code == 202
        assert ask(server, {**BODIES[0], "cache_salt": "fresh"}) == alone[0]
        server.assert_blocks_come_back()


def test_an_aggregated_worker_gives_the_same(tmp_path: Path, alone: list[dict[str, Any]]) -> None:
    for server in serve(AGGREGATED, tmp_path):
        assert ask_at_once(server, BODIES) == alone
        server.assert_blocks_come_back()


@pytest.mark.parametrize(("workers", "n"), [(AGGREGATED, N_NEW), (DISAGGREGATED, 1)], ids=["aggregated", "first token of a prefill worker"])
def test_a_request_computed_by_torchs_own_kernels_says_so_in_its_ledger(tmp_path: Path, workers: str, n: int) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG.replace("max_running: 4", "max_running: 4, exact: false, prefill_attention: torch") + workers)
    with running(config, tmp_path / "run") as server:
        body = {"model": "tiny", "prompt": prompt(40), "temperature": 0, "max_tokens": n}
        answer = server.http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert server.http.get(f"/v1/requests/{answer.headers['x-request-id']}/ledger").json()["exact"] is False
        refused = server.http.post("/v1/completions", json={**body, "prompt": ""})
        assert server.http.get(f"/v1/requests/{refused.headers['x-request-id']}/ledger").json()["exact"] is True  # nothing was computed
