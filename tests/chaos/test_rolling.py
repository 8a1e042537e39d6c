"""A rolling restart: every worker drained in turn, gateways too, under requests on new and on kept connections, and nobody is refused."""

import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.running import RunningServer, changed_config, running, until

BODY = {"prompt": "Once upon a time", "max_tokens": 24, "temperature": 0, "ignore_eos": True}


@pytest.fixture(params=[1, 2])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RunningServer]:
    tiny = {"source": "random:tiny-llama", "sha256": None, "name": "tiny"}
    (tmp_path / "config").mkdir()
    config = changed_config(tmp_path / "config", model=tiny, gateway={"workers": request.param}, engine={"kv_memory_mib": 16})
    with running(config, tmp_path / "server") as server:
        yield server


class Clients:
    """Threads that ask the same again and again, half of them on a new connection each time, until `stop`."""

    def __init__(self, server: RunningServer, n: int) -> None:
        self.texts: list[str] = []
        self.problems: list[str] = []
        self._url, self._over = f"{server.url}/v1/completions", threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(i % 2 == 0,)) for i in range(n)]
        for thread in self._threads:
            thread.start()

    def wait_for_more(self, n: int) -> None:
        before = len(self.texts)
        until(lambda: len(self.texts) >= before + n, 120, lambda: self.problems)

    def stop(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, keeps: bool) -> None:
        client = httpx.Client(timeout=300)
        while not self._over.is_set():
            try:
                response = client.post(self._url, json=BODY)
            except httpx.TransportError as error:
                self.problems.append(repr(error))
                continue
            if response.status_code == 200:
                self.texts.append(response.json()["choices"][0]["text"])
            else:
                self.problems.append(f"{response.status_code} {response.text}")
            if not keeps:
                client.close()
                client = httpx.Client(timeout=300)
        client.close()


def test_every_worker_is_restarted_and_no_request_is_refused(server: RunningServer) -> None:
    def row(worker: str) -> dict[str, object]:
        rows = server.http.get("/admin/workers").json()["workers"]
        return next(found for found in rows if found["worker"] == worker)

    text = server.http.post("/v1/completions", json=BODY).json()["choices"][0]["text"]
    clients = Clients(server, 6)
    try:
        for worker in sorted(server.pids()):
            clients.wait_for_more(10)
            assert server.http.post(f"/admin/workers/{worker}/drain").status_code == 202
            until(lambda worker=worker: row(worker)["epoch"] == 2 and row(worker)["state"] == "up", 120, lambda worker=worker: row(worker))
            assert row(worker)["last_death"] == "drained"
        clients.wait_for_more(10)
    finally:
        clients.stop()
    assert clients.problems == []
    assert set(clients.texts) == {text}
    server.assert_blocks_come_back()
