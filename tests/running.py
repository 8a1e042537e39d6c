"""A real server for tests: `relay serve` as its own process tree on a free port, and what must hold when it has ended."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

ROOT = Path(__file__).parent.parent
_URL = re.compile(rb"on (http://\S+), ")


class RunningServer:
    """`url` answers; `pids()` are the workers by name; `log()` is what all processes wrote."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, log_path: Path) -> None:
        self.process, self.url, self._log_path = process, url, log_path
        self.http = httpx.Client(base_url=url, timeout=300)

    def log(self) -> str:
        return self._log_path.read_text(errors="replace")

    def pids(self) -> dict[str, int]:
        """The newest process of each worker, from the log."""
        found = re.findall(r"^ +(\S+) +started, pid (\d+)$", self.log(), re.MULTILINE)
        return {name: int(pid) for name, pid in found}

    def ready(self) -> set[str]:
        """Workers that have been ready. A server is ready before all of them are."""
        return set(re.findall(r"^ +(\S+) +ready after ", self.log(), re.MULTILINE))

    def kv(self) -> dict[str, dict[str, Any]]:
        """The pools of all workers, once none is still starting."""
        body: dict[str, Any] = {}

        def all_answer() -> bool:
            body.update(self.http.get("/debug/kv").json())
            return not body["silent"]

        until(all_answer, 120, lambda: body)
        pools: dict[str, dict[str, Any]] = body["pools"]
        return pools

    def assert_blocks_come_back(self, within_s: float = 120.0) -> None:
        """The law of blocks, and that nothing is held once nothing runs."""
        until(lambda: all(pool["free"] + pool["cached"] == pool["total"] for pool in self.kv().values()), within_s, self.kv)
        for pool in self.kv().values():
            assert pool["problem"] == ""

    def stop(self, sig: signal.Signals = signal.SIGTERM) -> int:
        """Drain, and check that no process is left."""
        pids = self.pids()
        self.process.send_signal(sig)
        code = self.process.wait(timeout=300)
        assert [name for name, pid in pids.items() if alive(pid)] == []
        return code


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def until(holds: Any, within_s: float, shown: Any = lambda: "") -> None:
    """Wait for a condition of another process, which no event can tell."""
    deadline = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > deadline:
            raise AssertionError(f"it does not come true within {within_s} s: {shown()}")
        time.sleep(0.02)


def changed_config(folder: Path, name: str = "quickstart", **sections: dict[str, Any]) -> Path:
    """A config of ours with other values in some sections, as a file in `folder`."""
    config = yaml.safe_load((ROOT / "configs" / f"{name}.yaml").read_text())
    for section, values in sections.items():
        config[section] = {**config.get(section, {}), **values}
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@contextmanager
def running(config: Path, folder: Path) -> Iterator[RunningServer]:
    """Serve `config` on a free port until the block ends; killed if it does not end by itself."""
    folder.mkdir(parents=True, exist_ok=True)
    log_path = folder / "server.log"
    with log_path.open("wb") as log:
        command = [sys.executable, "-m", "relay", "serve", str(config), "--bind", "127.0.0.1:0"]
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, env={**os.environ, "TMPDIR": str(folder)})
    server: RunningServer | None = None
    try:
        url: list[bytes] = []

        def has_url() -> bool:
            assert process.poll() is None, log_path.read_text()
            url[:] = _URL.findall(log_path.read_bytes())
            return bool(url)

        until(has_url, 180, log_path.read_text)
        server = RunningServer(process, url[0].decode(), log_path)

        def is_ready() -> bool:
            assert process.poll() is None, log_path.read_text()
            try:
                return server.http.get("/readyz").status_code == 200
            except httpx.TransportError:
                return False

        until(is_ready, 300, log_path.read_text)
        until(lambda: len(server.pids()) == len(server.ready()), 300, log_path.read_text)
        yield server
        if process.poll() is None:
            assert server.stop() == 0, log_path.read_text()
        assert [path.name for path in folder.iterdir() if path.name != "server.log"] == []
    finally:
        if server is not None:
            server.http.close()
        if process.poll() is None:
            process.kill()
            process.wait()
