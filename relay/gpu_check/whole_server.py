"""Section `server`: the whole server on one device, disaggregated and aggregated: time to the first token, and a killed decode worker.

Needs the server's dependencies. Random weights: what is compared is the same text, and the same road.
"""

import http.client
import importlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from relay.gpu_check.report import Found, Row

NEEDS: Final = (
    "trio",
    "hypercorn",
    "starlette",
    "msgspec",
    "structlog",
    "tokenizers",
    "jinja2",
    "yaml",
    "prometheus_client",
    "rich",
    "click",
    "huggingface_hub",
)
TARGET: Final = 1.02  # disaggregated TTFT over aggregated
_READY_S: Final = 150.0
_CONFIG: Final = """
model: {{source: "random:{model}", name: m, max_context: {context}}}
gateway: {{bind: "127.0.0.1:0"}}
engine: {{kv_memory_mib: {kv_mib}, max_running: {running}, max_chunk_tokens: {chunk}}}
runtime: {{hang_s: 60, silent_s: 60, ready_within_s: 140}}
workers:
"""
_WORKERS: Final = {
    "disaggregated": "  - {{name: prefill, roles: [prefill], {device}}}\n  - {{name: decode, roles: [decode], {device}}}\n",
    "aggregated": "  - {{name: engine, roles: [prefill, decode], {device}}}\n",
}


class Server:
    def __init__(self, port: int, log: Path) -> None:
        self._port, self._log = port, log

    def stream(self, prompt: list[int], n_tokens: int) -> Iterator[tuple[float, str]]:
        """(seconds since the request, text) of each event."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=120)
        body = {"model": "m", "prompt": prompt, "max_tokens": n_tokens, "temperature": 0, "stream": True, "cache_salt": str(time.time_ns())}
        started = time.perf_counter()
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise RuntimeError(f"{answer.status}: {answer.read(2000)!r}")
        for line in answer:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    raise RuntimeError(f"the stream ended in {event['error']}")
                if event["choices"]:
                    yield time.perf_counter() - started, event["choices"][0]["text"]
        connection.close()

    def pid(self, worker: str) -> int:
        return int(re.findall(rf"^ +{worker} +started, pid (\d+)$", self._log.read_text(), re.MULTILINE)[-1])


def run(found: Found, rehearse: bool) -> None:
    for name in NEEDS:
        importlib.import_module(name)
    n_prompt, n_tokens, times = (70, 8, 2) if rehearse else (4000, 64, 7)
    prompt = [i * 7 % 251 for i in range(n_prompt)]
    ttft, texts = {}, {}
    for kind in _WORKERS:
        with serving(kind, rehearse) as server:
            firsts = []
            for _ in range(times):
                events = list(server.stream(prompt, n_tokens))
                firsts.append(events[0][0])
                texts[kind] = "".join(text for _, text in events)
            ttft[kind] = statistics.median(firsts[1:])
            found.time(f"{kind}: first token of {n_prompt} prompt tokens", 1e3 * ttft[kind], "ms")
            if kind == "disaggregated":
                found.holds("a killed decode worker changes no token", _killed(server, prompt, n_tokens) == texts[kind])
    found.holds("both give the same text", texts["disaggregated"] == texts["aggregated"])
    ratio = ttft["disaggregated"] / ttft["aggregated"]
    found.add(_ratio(ratio))


def _ratio(ratio: float) -> Row:
    return Row("first token, disaggregated over aggregated", ratio, "", target=TARGET, ok=ratio <= TARGET)


def _killed(server: Server, prompt: list[int], n_tokens: int) -> str:
    text = ""
    for i, (_, more) in enumerate(server.stream(prompt, n_tokens)):
        text += more
        if i == 2:
            os.kill(server.pid("decode-0"), signal.SIGKILL)
    return text


@contextmanager
def serving(kind: str, rehearse: bool) -> Iterator[Server]:
    device = "device: emulated" if rehearse else "device: cuda, gpus: [0]"
    sizes = {"model": "tiny-llama-64", "context": 512, "kv_mib": 2, "running": 4, "chunk": 64}
    if not rehearse:
        sizes = {"model": "smollm2-135m", "context": 8192, "kv_mib": 4096, "running": 64, "chunk": 4096}
    with tempfile.TemporaryDirectory() as folder:
        config, log = Path(folder) / "config.yaml", Path(folder) / "log"
        config.write_text(_CONFIG.format(**sizes) + _WORKERS[kind].format(device=device))
        command = [sys.executable, "-m", "relay", "serve", str(config)]
        with log.open("wb") as file:
            process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        try:
            yield Server(_port_when_ready(process, log), log)
        finally:
            process.terminate()
            try:
                process.wait(40)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _port_when_ready(process: subprocess.Popen[bytes], log: Path) -> int:
    deadline = time.monotonic() + _READY_S
    while time.monotonic() < deadline and process.poll() is None:
        text = log.read_text(errors="replace")
        if "ready. Try:" in text:
            return int(re.findall(r"on http://127\.0\.0\.1:(\d+), ", text)[0])
        time.sleep(0.1)
    raise RuntimeError(f"the server does not become ready:\n{log.read_text(errors='replace')[-3000:]}")
