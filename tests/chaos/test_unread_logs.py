"""Whatever becomes of what the server writes, requests are answered, the dead replaced and signals heard."""

import fcntl
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.chaos.test_too_often import CONFIG
from tests.running import ROOT, until

F_SETPIPE_SZ = 1031


@contextmanager
def sink(kind: str) -> Iterator[int]:
    """Where to write to: a pipe that nobody reads, one whose reader has gone, a disk without room."""
    if kind == "full disk":
        fd = os.open("/dev/full", os.O_WRONLY)
    else:
        read, fd = os.pipe()
        fcntl.fcntl(fd, F_SETPIPE_SZ, 4096)
        if kind == "no reader":
            os.close(read)
    try:
        yield fd
    finally:
        os.close(fd)
        if kind == "not read":
            os.close(read)


@contextmanager
def serving(command: list[str], out: int, folder: Path) -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen(command, stdout=out, stderr=out, cwd=ROOT, env={**os.environ, "TMPDIR": str(folder)})
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def children(pid: int) -> dict[str, int]:
    """Its workers by name, as far as a step board that they map tells: decode-0."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == pid and "relay-board-decode-0" in (path / "maps").read_text():
                found["decode-0"] = int(path.name)
        except (OSError, IndexError):
            continue
    return found


@pytest.mark.parametrize("kind", ["not read", "no reader", "full disk"])
def test_the_server_goes_on_and_hears_signals(tmp_path: Path, kind: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (tmp_path / "tiny.yaml").write_text(CONFIG)
    command = [sys.executable, "-m", "relay", "serve", str(tmp_path / "tiny.yaml"), "--bind", f"127.0.0.1:{port}"]
    with (
        sink(kind) as out,
        serving(command, out, tmp_path) as process,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300) as client,
    ):

        def answers() -> bool:
            assert process.poll() is None
            try:
                return client.post("/v1/completions", json={"prompt": [1, 2], "max_tokens": 1}).status_code == 200
            except httpx.TransportError:
                return False

        until(answers, 120)
        for _ in range(100):  # each writes a line
            assert answers()
        first = children(process.pid)["decode-0"]
        os.kill(first, signal.SIGKILL)
        until(lambda: children(process.pid).get("decode-0", first) != first, 120)
        until(answers, 120)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
