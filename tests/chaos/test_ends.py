"""How a server ends: SIGTERM and SIGINT drain, a killed root takes its workers with it, and nothing is left behind."""

import signal
import threading
from pathlib import Path

import httpx
import pytest

from tests.running import ROOT, alive, running, until


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_a_drained_server_finishes_its_streams_and_leaves_nothing(tmp_path: Path, smollm2_path: Path, sig: signal.Signals) -> None:
    with running(ROOT / "configs" / "quickstart.yaml", tmp_path) as server:
        texts: list[str] = []
        body = {"prompt": "Once", "max_tokens": 30, "temperature": 0, "stream": True, "ignore_eos": True}

        def read() -> None:
            with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=300) as response:
                texts.extend(response.iter_text())

        reader = threading.Thread(target=read)
        reader.start()
        until(lambda: len(texts) >= 2, 120)
        server.process.send_signal(sig)
        until(lambda: "draining gateway-0" in server.log(), 120)
        response = server.http.post("/v1/completions", json={"prompt": "x"})
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "draining"
        assert int(response.headers["retry-after"]) >= 1
        assert server.http.get("/readyz").status_code == 503
        reader.join(60)
        assert "".join(texts).endswith("data: [DONE]\n\n")
        assert server.process.wait(60) == 0
        assert [name for name, pid in server.pids().items() if alive(pid)] == []


def test_a_killed_root_leaves_no_process(tmp_path: Path, smollm2_path: Path) -> None:
    """Its run directory is swept by the next one."""
    with running(ROOT / "configs" / "quickstart.yaml", tmp_path / "a") as server:
        pids = server.pids()
        assert len(pids) == 4
        server.process.kill()
        server.process.wait()
        until(lambda: not any(alive(pid) for pid in pids.values()), 120)
        for path in (tmp_path / "a").iterdir():
            if path.is_dir():
                for each in path.iterdir():
                    each.unlink()
                path.rmdir()
