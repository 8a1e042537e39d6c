"""A model with a token whose embedding is NaN: who asks for it gets a typed error, everybody else an answer of the same workers."""

import concurrent.futures
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from relay.model.source import resolve
from tests.model.tiny import folder
from tests.running import RunningServer, running

BROKEN = 200
CONFIG = """
model: {{source: "{source}", name: tiny}}
gateway: {{bind: 127.0.0.1:0}}
router: {{local_prefill_tokens: 24}}
engine: {{kv_memory_mib: 32}}
workers:
  - {{name: prefill, roles: [prefill]}}
  - {{name: decode, roles: [decode]}}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    model = tmp_path_factory.mktemp("model") / "broken"
    shutil.copytree(folder("llama"), model)
    for path in resolve("random:tiny-llama", sha256=None).glob("tokenizer*"):
        shutil.copy(path, model)
    tensors = load_file(model / "model.safetensors")
    tensors["model.embed_tokens.weight"][BROKEN] = float("nan")
    save_file(tensors, model / "model.safetensors")
    path = tmp_path_factory.mktemp("config") / "broken.yaml"
    path.write_text(CONFIG.format(source=model))
    with running(path, tmp_path_factory.mktemp("broken")) as server:
        yield server


def ask(server: RunningServer, prompt: list[int], **more: Any) -> tuple[int, dict[str, Any]]:
    response = server.http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 40, "temperature": 0, "ignore_eos": True, **more})
    return response.status_code, response.json()


@pytest.mark.parametrize("n_prompt", [10, 60])  # computed by the decode worker itself, or by a prefill worker
@pytest.mark.parametrize("at", [2, -1])
def test_it_ends_in_a_typed_error_and_disturbs_nobody(server: RunningServer, n_prompt: int, at: int) -> None:
    good = [[20 + (7 * i + j) % 150 for j in range(n_prompt)] for i in range(4)]
    right = [ask(server, prompt) for prompt in good]
    bad = list(good[0])
    bad[at] = BROKEN
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        others = [pool.submit(ask, server, prompt) for prompt in good]
        broken = [pool.submit(ask, server, bad, temperature=t, seed=1, logprobs=logprobs) for t in (0.0, 0.9) for logprobs in (None, 2)]
    for future in broken:
        status, body = future.result()
        assert (status, body["error"]["code"]) == (422, "poison_request")
        assert "not finite" in body["error"]["message"]
    assert [future.result()[1]["choices"] for future in others] == [body["choices"] for _, body in right]
    assert all(worker["restarts"] == 0 for worker in server.http.get("/admin/workers").json()["workers"])
