"""Section `server`: the whole server on one device, disaggregated and aggregated: time to the first token, and a killed decode worker.

Needs the server's dependencies and a checkout: it runs what configs/cuda-*.yaml ship, on random weights of the same shape, for a machine
with a GPU may have no network. The first start finds an empty cache, as on a new machine: what is compiled only when a step first needs it
shows, as a new file after the server said that it is ready, and where it takes longer than the shipped `hang_s` as a lost worker.
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
from typing import Any, Final

from relay.gpu_check.report import Found, Row, Skip
from relay.model.source import resolve

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
KINDS: Final = ("disaggregated", "aggregated")
TARGET: Final = 1.02  # disaggregated TTFT over aggregated
CONFIGS: Final = Path(__file__).resolve().parent.parent.parent / "configs"
_READY_S: Final = 150.0


class Server:
    """cache: the folder that it compiles into."""

    def __init__(self, port: int, log: Path, cache: Path) -> None:
        self._port, self._log, self._cache = port, log, cache
        self._compiled = compiled(cache)
        self.n_killed = 0

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

    def compiled_since(self) -> list[str]:
        """What was not there when it said that it is ready."""
        return sorted(compiled(self._cache) - self._compiled)

    def lost(self) -> list[str]:
        """Workers that ended, and why."""
        return re.findall(r"^ +(\S+ +ended: .*)$", self._log.read_text(), re.MULTILINE)

    def kill(self, worker: str) -> None:
        self.n_killed += 1
        os.kill(self.pid(worker), signal.SIGKILL)

    def pid(self, worker: str) -> int:
        return int(re.findall(rf"^ +{worker} +started, pid (\d+)$", self._log.read_text(), re.MULTILINE)[-1])


def run(found: Found, rehearse: bool) -> None:
    for name in NEEDS:
        importlib.import_module(name)
    if not CONFIGS.is_dir():
        raise Skip(f"{CONFIGS} is not there: it needs a checkout")
    with tempfile.TemporaryDirectory() as cache:
        _both(found, rehearse, Path(cache))


def _both(found: Found, rehearse: bool, cache: Path) -> None:
    n_prompt, n_tokens, times = (70, 8, 2) if rehearse else (4000, 64, 7)
    prompt = [i * 7 % 251 for i in range(n_prompt)]
    ttft, texts = {}, {}
    for kind in KINDS:
        with serving(kind, rehearse, cache) as server:
            try:
                firsts = []
                for _ in range(times):
                    events = list(server.stream(prompt, n_tokens))
                    firsts.append(events[0][0])
                    texts[kind] = "".join(text for _, text in events)
                ttft[kind] = statistics.median(firsts[1:])
                found.time(f"{kind}: first token of {n_prompt} prompt tokens", 1e3 * ttft[kind], "ms")
                if kind == "disaggregated":
                    found.holds("a killed decode worker changes no token", _killed(server, prompt, n_tokens) == texts[kind])
            finally:  # where a stream fails, this says why
                _undisturbed(found, kind, server)
    found.holds("both give the same text", texts["disaggregated"] == texts["aggregated"])
    ratio = ttft["disaggregated"] / ttft["aggregated"]
    found.add(_ratio(ratio))


def _undisturbed(found: Found, kind: str, server: Server) -> None:
    lost, late = server.lost(), server.compiled_since()
    found.holds(f"{kind}: no worker was lost but by being killed", len(lost) == server.n_killed, "; ".join(lost[:3]))
    found.holds(f"{kind}: nothing was compiled once it was ready", not late, ", ".join(late))


def _ratio(ratio: float) -> Row:
    return Row("first token, disaggregated over aggregated", ratio, "", target=TARGET, ok=ratio <= TARGET)


def _killed(server: Server, prompt: list[int], n_tokens: int) -> str:
    text = ""
    for i, (_, more) in enumerate(server.stream(prompt, n_tokens)):
        text += more
        if i == 2:
            server.kill("decode-0")
    return text


def settings(kind: str, rehearse: bool) -> dict[str, Any]:
    """As shipped, but for the model, and a port that is free. Rehearsed: small, on an emulated device, whose steps take seconds."""
    import yaml

    shipped: dict[str, Any] = yaml.safe_load((CONFIGS / f"cuda-{kind}.yaml").read_text(encoding="utf-8"))
    model = resolve(f"random:{'tiny-llama-64' if rehearse else 'smollm2-135m'}", sha256=None)
    shipped |= {"model": {"source": str(model), "name": "m"}, "gateway": {"bind": "127.0.0.1:0"}}
    if rehearse:
        shipped["model"]["max_context"] = 512
        shipped["engine"] = {"kv_memory_mib": 2, "max_running": 4, "max_chunk_tokens": 64}
        shipped["runtime"] = {"ready_within_s": 600, "hang_s": 60}
        shipped["workers"] = [{"name": each["name"], "roles": each["roles"], "device": "emulated"} for each in shipped["workers"]]
    return shipped


def compiled(cache: Path) -> set[str]:
    """Names of what was compiled into a folder, or is being: our compilers take a lock of that name first, CuPy's takes none."""
    return {path.stem for path in cache.rglob("*") if path.suffix in (".lock", ".cubin")}


@contextmanager
def serving(kind: str, rehearse: bool, cache: Path) -> Iterator[Server]:
    with tempfile.TemporaryDirectory() as folder:
        config, log = Path(folder) / "config.yaml", Path(folder) / "log"
        config.write_text(json.dumps(settings(kind, rehearse)))
        command = [sys.executable, "-m", "relay", "serve", str(config)]
        with log.open("wb") as file:
            environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "CUPY_CACHE_DIR": str(cache / "cupy")}
            process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
        try:
            yield Server(_port_when_ready(process, log, _READY_S * (4 if rehearse else 1)), log, cache)
        finally:
            process.terminate()
            try:
                process.wait(40)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _port_when_ready(process: subprocess.Popen[bytes], log: Path, within_s: float) -> int:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline and process.poll() is None:
        text = log.read_text(errors="replace")
        if "ready. Try:" in text:
            return int(re.findall(r"on http://127\.0\.0\.1:(\d+), ", text)[0])
        time.sleep(0.1)
    raise RuntimeError(f"the server does not become ready:\n{log.read_text(errors='replace')[-3000:]}")
