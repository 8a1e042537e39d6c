"""The server under test: `relay serve` as a process of its own, with faults allowed, and what may be asked of it from outside."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from relay.errors import StartError
from relay.runtime.child import signal_at_parents_death

_URL = re.compile(r"on (http://\S+), ")
_RUNTIME = {"allow_faults": True, "max_restarts": 100_000, "first_backoff_s": 0.0, "hang_s": 2.0, "silent_s": 1.5}


class ServerUnderTest:
    """A context: started on a free port when entered, drained when left."""

    def __init__(self, config: Path, **sections: dict[str, Any]) -> None:
        """`sections`: values that replace the config's, and what chaos sets by itself."""
        self._raw = yaml.safe_load(config.read_text(encoding="utf-8"))
        for section, values in {**sections, "runtime": {**_RUNTIME, **sections.get("runtime", {})}}.items():
            self._raw[section] = {**(self._raw.get(section) or {}), **values}
        self._folder = tempfile.TemporaryDirectory(prefix="relay-chaos-")
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""

    def __enter__(self) -> "ServerUnderTest":
        folder = Path(self._folder.name)
        config = folder / "chaos.yaml"
        config.write_text(yaml.safe_dump(self._raw), encoding="utf-8")
        self._log_path = folder / "log"
        with self._log_path.open("wb") as log:
            command = [sys.executable, "-m", "relay", "serve", str(config), "--bind", "127.0.0.1:0"]
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "TMPDIR": str(folder)},
                preexec_fn=partial(signal_at_parents_death, signal.SIGTERM),  # whoever kills us: it drains
            )
        deadline = time.monotonic() + 180
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                words = self.log()[-2000:]
                self.__exit__()
                raise StartError(f"the server does not start: {words}")
            time.sleep(0.1)
        return self

    def __exit__(self, *_: object) -> None:
        self.end(60.0)
        self._folder.cleanup()

    def end(self, within_s: float) -> list[str]:
        """Drain it; killed if it takes longer. What it left behind: processes, files of its own, and that it did not end by itself."""
        assert self._process is not None
        left = []
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(max(0.0, within_s))
            except subprocess.TimeoutExpired:
                left.append(f"it does not end within {within_s:.0f} s")
                self._process.kill()
                self._process.wait()
        if self._process.returncode:
            left.append(f"it ended with {self._process.returncode}")
        left += [f"process {pid} ({state})" for pid, state in self._session().items()]
        return left + sorted(path.name for path in Path(self._folder.name).iterdir() if path.name not in ("chaos.yaml", "log"))

    def log(self) -> str:
        return self._log_path.read_text(errors="replace")

    def log_size(self) -> int:
        return self._log_path.stat().st_size

    def restarts(self, since: int) -> list[dict[str, float]]:
        """Milliseconds of every restart of an engine worker, by part, that the log tells of behind its first `since` bytes."""
        loaded: dict[tuple[str, int], dict[str, float]] = {}
        found = []
        for line in self._log_path.read_bytes()[since:].splitlines():
            if not line.startswith(b'{"'):
                continue
            event = json.loads(line)
            life = event.get("worker", ""), event.get("epoch", 0)
            if event["event"] == "engine loaded":
                loaded[life] = event["took_ms"]
            elif event["event"] == "worker_ready" and life in loaded:
                parts, total = loaded[life], 1e3 * event["in_s"]
                found.append({"process": total - sum(parts.values()), **parts, "total": total})
        return found

    def workers(self) -> dict[str, dict[str, Any]]:
        """The process table."""
        return {row["worker"]: row for row in self._processes()["workers"]}

    def spares(self) -> list[int]:
        """Process ids of those that wait to replace a dead worker."""
        return list(self._processes()["spares"])

    def _processes(self) -> Any:
        return self._get("/admin/workers")

    def all_up(self) -> bool:
        try:
            return all(row["state"] == "up" for row in self.workers().values())
        except OSError:
            return False

    def kill(self, worker: str, sig: signal.Signals = signal.SIGKILL, *, announced: bool = True) -> bool:
        """From outside. A SIGKILL that is announced is told the worker's step board before, and is no sign against any request. Whether
        there was such a process."""
        if sig == signal.SIGKILL and announced:
            with suppress(OSError, http.client.HTTPException):  # it may have died, or be unable to answer
                self.arm(worker, "now", "announce", within_s=2.0)
        pid = self.workers()[worker]["pid"]
        if pid is None:
            return False
        with suppress(ProcessLookupError):
            os.kill(pid, sig)
            return True
        return False

    def arm(self, worker: str, point: str, action: str, *, after: int = 1, seconds: float = 1.0, within_s: float = 10.0) -> None:
        fault = {"worker": worker, "point": point, "action": action, "after": after, "seconds": seconds}
        json_type = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}/admin/faults", json.dumps(fault).encode(), json_type, method="POST")
        urllib.request.urlopen(request, timeout=within_s).read()

    def attempts(self, request_id: str) -> int:
        """Of an ended request; 0 if its gateway has died since."""
        try:
            return int(self._get(f"/v1/requests/{request_id}/ledger")["attempts"])
        except OSError:
            return 0

    def blocks_held(self) -> int:
        """Blocks that are neither free nor cached, over all pools; -1 while a pool does not answer or does not add up."""
        body = self._get("/debug/kv")
        if body["silent"] or any(pool["problem"] for pool in body["pools"].values()):
            return -1
        return sum(pool["total"] - pool["free"] - pool["cached"] for pool in body["pools"].values())

    def stray_processes(self) -> int:
        """Processes of this server's session that the process table does not know."""
        assert self._process is not None
        table = self._processes()
        known = {row["pid"] for row in table["workers"]} | {*table["spares"], self._process.pid}
        return sum(state != "Z" and pid not in known for pid, state in self._session().items())

    def zombies(self) -> int:
        """Processes of this server's session that have ended, and that their parent has not asked after."""
        return list(self._session().values()).count("Z")

    def _session(self) -> dict[int, str]:
        """State of every process of this server's session."""
        assert self._process is not None
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    stat = (entry / "stat").read_text().rpartition(") ")[2].split()
                except OSError:
                    continue
                if int(stat[3]) == self._process.pid:
                    found[int(entry.name)] = stat[0]
        return found

    def pids(self) -> dict[str, int]:
        """Of the root, the workers and the spares, by name."""
        assert self._process is not None
        table = self._processes()
        named = {"root": self._process.pid, **{row["worker"]: row["pid"] for row in table["workers"] if row["pid"] is not None}}
        return {**named, **{f"spare {n}": pid for n, pid in enumerate(table["spares"])}}

    def memory_bytes(self) -> int:
        """Anonymous memory of all processes of the server. Pools and weights are not: their size is fixed."""
        return sum(anonymous_bytes(pid) for pid in self.pids().values())

    def _is_ready(self) -> bool:
        if not self.url:
            found = _URL.search(self.log())
            if found is None:
                return False
            self.url = found[1]
        try:
            return self._get("/readyz")["status"] == "ready" and self.all_up()
        except OSError:
            return False

    def _get(self, path: str) -> Any:
        try:
            with urllib.request.urlopen(self.url + path, timeout=10) as response:
                return json.loads(response.read())
        except (urllib.error.HTTPError, ValueError) as error:
            raise OSError(str(error)) from error


def anonymous_bytes(pid: int) -> int:
    """What a process has of its own; 0 if it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("RssAnon:"))
