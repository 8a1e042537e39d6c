"""configs/two-by-two.yaml as it is: under load every process takes part, and a conversation finds its own beginning again."""

import concurrent.futures
import json
import re
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import httpx
import pytest

from relay.model.text_files import read_text_files
from relay.text.chat_template import encode_chat
from tests.running import ROOT, RunningServer, running, until

STORY = "A fisherman of the northern islands found a bell of green bronze in his net, and it rang by itself before each storm. " * 3


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Iterator[RunningServer]:
    with running(ROOT / "configs" / "two-by-two.yaml", tmp_path_factory.mktemp("two-by-two")) as server:
        until(lambda: all(worker in counts(server, "relay_steps_total") for worker in WORKERS), 120)
        yield server


WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1")


def counts(server: RunningServer, name: str) -> dict[str, float]:
    """Of one metric by worker."""
    page = server.http.get("/metrics").text
    return {worker: float(n) for worker, n in re.findall(rf'^{name}\{{worker="([^"]+)"\}} (\S+)$', page, re.MULTILINE)}


def fresh(server: RunningServer, path: str, **body: Any) -> httpx.Response:
    """On a connection of its own: any gateway may get it."""
    return httpx.post(f"{server.url}{path}", json=body, timeout=300)


def test_under_load_every_process_takes_part_and_no_answer_is_mixed_up(server: RunningServer) -> None:
    prefilled, decoded = counts(server, "relay_prefill_tokens_computed_total"), counts(server, "relay_decode_rows_computed_total")

    def ask(n: int) -> httpx.Response:
        body = {"prompt": f"Tale {n % 8}. {STORY[:120]}", "max_tokens": 12, "temperature": 0, "ignore_eos": True, "cache_salt": str(n)}
        return fresh(server, "/v1/completions", **body)

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, range(32)))
    assert {answer.status_code for answer in answers} == {200}
    for n in range(8):
        assert len({json.dumps(answer.json()["choices"]) for answer in answers[n::8]}) == 1
    assert len({answer.headers["x-request-id"].partition("-")[0] for answer in answers}) == 2  # the gateways
    for worker in ("prefill-0", "prefill-1"):
        assert counts(server, "relay_prefill_tokens_computed_total")[worker] - prefilled[worker] > 0.2 * 32 * 30
    for worker in ("decode-0", "decode-1"):
        assert counts(server, "relay_decode_rows_computed_total")[worker] - decoded[worker] > 0.2 * 32 * 11
    server.assert_blocks_come_back()


def test_a_conversation_finds_its_beginning_again_and_answers_as_if_it_had_not(server: RunningServer, smollm2_path: Path) -> None:
    """Each turn is sent on a new connection, and cached is exactly what the last turn's prompt has in common with it, in whole blocks."""
    tokenizer, template = read_text_files(smollm2_path)
    assert template is not None
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"Go on with this tale. {STORY}"}]
    before: list[int] = []
    for turn in range(4):
        body: dict[str, Any] = {"messages": messages, "max_tokens": 14, "temperature": 0}
        ids = encode_chat(tokenizer, template, messages, add_generation_prompt=True, continue_final_message=False)
        warm = fresh(server, "/v1/chat/completions", **body).json()
        cold = fresh(server, "/v1/chat/completions", **body, cache_salt=f"turn {turn}").json()
        assert warm["choices"] == cold["choices"]
        assert warm["usage"]["prompt_tokens"] == len(ids)
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ids, before, strict=False)))
        assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] == common // 16 * 16
        assert turn == 0 or common > 80
        before = ids
        answer = warm["choices"][0]["message"]["content"]
        messages = [*messages, {"role": "assistant", "content": answer}, {"role": "user", "content": f"And then, {turn}?"}]
