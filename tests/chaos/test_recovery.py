"""What is special to recovery: roles in reserve, draining one worker, deadlines, streams that outlive their gateway."""

import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.running import RunningServer, changed_config, running, until

BODY: dict[str, Any] = {"prompt": "The history of bread begins", "max_tokens": 40, "temperature": 0, "stream": True, "ignore_eos": True}
SECRET = {"X-Relay-Resume": "only-these-tests-know-it"}  # so that the ID of a client's own is enough to find its stream


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Iterator[RunningServer]:
    config = changed_config(tmp_path_factory.mktemp("config"), gateway={"workers": 2}, runtime={"drain_s": 120.0, "readers_back_s": 60.0})
    with running(config, tmp_path_factory.mktemp("recovery")) as server:
        yield server


@pytest.fixture(autouse=True)
def _laws(server: RunningServer) -> Iterator[None]:
    yield
    until(lambda: all_up(server), 120, server.log)
    server.assert_blocks_come_back()


def processes(server: RunningServer) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = server.http.get("/admin/workers").json()["workers"]
    return rows


def all_up(server: RunningServer) -> bool:
    try:
        return {row["state"] for row in processes(server)} == {"up"}
    except httpx.TransportError:
        return False  # its gateway was killed


def pid_of(server: RunningServer, worker: str) -> int:
    pid: int = next(row["pid"] for row in processes(server) if row["worker"] == worker)
    return pid


class Reader:
    """Reads one stream on a thread; keeps the id of the last event."""

    def __init__(self, url: str, method: str = "POST", headers: dict[str, str] | None = None, body: dict[str, Any] | None = None) -> None:
        self.text, self.last_id, self.status, self.n_events = "", "", 0, 0
        self.done = False
        self._next_id = ""
        self.error: dict[str, Any] = {}
        self.request_id = self.stream_id = ""
        self._stop = threading.Event()
        self._args = (method, url, headers or {}, body)
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        method, url, headers, body = self._args
        try:
            with httpx.stream(method, url, headers=headers, json=body, timeout=300) as response:
                self.status, self.request_id = response.status_code, response.headers["x-request-id"]
                self.stream_id = response.headers.get("x-relay-resume", "")
                if self.status != 200:
                    self.error = json.loads(response.read())["error"]
                    return
                for line in response.iter_lines():
                    self._take(line)
                    if self._stop.is_set():
                        return
        except httpx.TransportError:
            pass

    def _take(self, line: str) -> None:
        if line.startswith("id: "):
            self._next_id = line[4:]
        elif line == "":
            self.last_id = self._next_id  # an event counts once its blank line has come
        elif line == "data: [DONE]":
            self.done = True
        elif line.startswith("data: "):
            event = json.loads(line[6:])
            if "error" in event:
                self.error = event["error"]
                return
            self.n_events += 1
            self.text += "".join(choice.get("text", "") for choice in event["choices"])

    def leave(self) -> "Reader":
        self._stop.set()
        return self.join()

    def join(self) -> "Reader":
        self._thread.join(120)
        assert not self._thread.is_alive()
        return self


@pytest.fixture(scope="module")
def undisturbed(server: RunningServer) -> str:
    reader = Reader(f"{server.url}/v1/completions", body=BODY).join()
    assert reader.done
    return reader.text


def test_without_a_decode_worker_the_prefill_worker_decodes(server: RunningServer, undisturbed: str) -> None:
    reader = Reader(f"{server.url}/v1/completions", body=BODY)
    until(lambda: reader.n_events >= 4, 120)
    os.kill(pid_of(server, "decode-0"), signal.SIGKILL)
    assert reader.join().text == undisturbed
    ledger = server.http.get(f"/v1/requests/{reader.request_id}/ledger").json()
    assert ledger["attempts"] == 2
    assert ledger["decisions"][-1]["decode"][0]["worker"].startswith("decode/1@")
    assert ledger["spans"]["retry.wasted"] > 0
    assert sum(ledger["spans"].values()) == ledger["wall_ns"]


@pytest.mark.parametrize("worker", ["decode-0", "prefill-0", "router-0"])
@pytest.mark.parametrize("how", ["admin", "signal"])
def test_one_worker_is_drained_and_no_request_notices(server: RunningServer, undisturbed: str, worker: str, how: str) -> None:
    """dynamo: a worker 'drains' but its stream stops at SIGTERM (ai-dynamo/dynamo#791)."""
    before = pid_of(server, worker)
    readers = [Reader(f"{server.url}/v1/completions", body=BODY) for _ in range(2)]
    until(lambda: all(reader.n_events >= 3 for reader in readers), 120)
    if how == "admin":
        assert server.http.post(f"/admin/workers/{worker}/drain").status_code == 202
    else:
        os.kill(before, signal.SIGTERM)
    for reader in readers:
        assert reader.join().text == undisturbed
        assert reader.done
    until(lambda: pid_of(server, worker) not in (before, None), 120)
    row = next(row for row in processes(server) if row["worker"] == worker)
    assert row["last_death"] == "drained"


def test_an_unknown_worker_is_not_drained(server: RunningServer) -> None:
    assert server.http.post("/admin/workers/nobody-0/drain").status_code == 404


@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_ends_a_request_and_frees_it(server: RunningServer, stream: bool) -> None:
    body = {**BODY, "max_tokens": 5000, "stream": stream}
    response = server.http.post("/v1/completions", json=body, headers={"X-Request-Timeout": "8"})
    if stream:
        assert response.status_code == 200
        last = response.text.strip().split("\n\n")[-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "deadline_exceeded"
    else:
        assert response.status_code == 504
        assert response.json()["error"]["code"] == "deadline_exceeded"
    server.assert_blocks_come_back()


@pytest.mark.parametrize("bad", ["0", "-1", "soon", "1e9", "nan", "999999"])
def test_a_deadline_that_is_none_is_refused(server: RunningServer, bad: str) -> None:
    response = server.http.post("/v1/completions", json=BODY, headers={"X-Request-Timeout": bad})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "X-Request-Timeout"


def gateway_of(server: RunningServer, request_id: str) -> str:
    """Which gateway process has this request, from the log that names it."""
    match = re.search(rf'"request_id": "{request_id}"[^\n]*"worker": "(gateway-\d)"', server.log())
    assert match is not None
    return match[1]


def leave(server: RunningServer, reader: Reader, gone: str) -> None:
    """Its connection is over: the client closes it, or every gateway is killed."""
    if gone == "client":
        reader.leave()
    else:
        for pid in [row["pid"] for row in processes(server) if row["worker"].startswith("gateway")]:
            os.kill(pid, signal.SIGKILL)
        reader.join()


@pytest.mark.parametrize("gone", ["client", "gateways"])
@pytest.mark.parametrize("more", [{}, {"n": 2, "temperature": 0.8, "seed": 3, "stop": ["zzzz"], "logprobs": 1}], ids=["plain", "rich"])
def test_a_resumable_stream_goes_on_where_its_client_stopped_reading(
    server: RunningServer, undisturbed: str, gone: str, more: dict[str, Any]
) -> None:
    body = {**BODY, **more}
    whole = Reader(f"{server.url}/v1/completions", body=body).join()
    assert whole.done
    reader = Reader(f"{server.url}/v1/completions", headers={**SECRET, "X-Request-ID": f"mine-{gone}-{len(more)}"}, body=body)
    until(lambda: reader.n_events >= 6, 120)
    leave(server, reader, gone)
    assert not reader.done
    assert re.fullmatch(r"0\.\d+(;1\.\d+)?", reader.last_id)

    def come_back() -> Reader | None:
        try:
            found = Reader(
                f"{server.url}/v1/requests/mine-{gone}-{len(more)}/stream",
                method="GET",
                headers={**SECRET, "Last-Event-ID": reader.last_id},
            ).join()
        except httpx.TransportError:
            return None
        return found if found.status == 200 else None

    rest: list[Reader] = []

    def has_rest() -> bool:
        found = come_back()
        rest.extend([found] if found is not None else [])
        return bool(rest)

    until(has_rest, 120, lambda: server.log()[-3000:])
    assert rest[0].done, rest[0].error
    if not more:
        assert reader.text + rest[0].text == whole.text == undisturbed
    else:
        assert sorted(reader.text + rest[0].text) == sorted(whole.text)


def resumed(server: RunningServer, name: str, last_id: str, **headers: str) -> Reader:
    return Reader(f"{server.url}/v1/requests/{name}/stream", method="GET", headers={"Last-Event-ID": last_id, **headers})


def test_a_stream_is_its_clients_alone_and_an_id_that_others_can_guess_gives_no_access(server: RunningServer, undisturbed: str) -> None:
    name = "order-17"
    headers = {"X-Relay-Resume": "true", "X-Request-ID": name}
    reader = Reader(f"{server.url}/v1/completions", headers=headers, body=BODY)
    until(lambda: reader.n_events >= 3, 120)
    for stranger in (resumed(server, name, ""), resumed(server, name, "", **{"X-Relay-Resume": "true"})):
        assert stranger.join().error["code"] == "stream_lost"
    assert reader.leave().stream_id not in ("", name)
    rest = resumed(server, reader.stream_id, reader.last_id).join()
    assert (rest.done, reader.text + rest.text) == (True, undisturbed)


def test_whoever_uses_the_name_of_a_stream_for_his_own_shuts_nobody_out(server: RunningServer, undisturbed: str) -> None:
    headers = {"X-Request-ID": "victim-id"}
    reader = Reader(f"{server.url}/v1/completions", headers={**headers, **SECRET}, body=BODY)
    until(lambda: reader.n_events >= 3, 120)
    others = [
        Reader(f"{server.url}/v1/completions", headers={**headers, "X-Relay-Resume": how}, body={**BODY, "n": 2, "max_tokens": 2})
        for how in ("true", "another-secret-of-a-stranger")
    ]
    assert all(other.join().done for other in others)
    reader.leave()
    rest = resumed(server, "victim-id", reader.last_id, **SECRET).join()
    assert (rest.done, reader.text + rest.text) == (True, undisturbed)


def test_of_readers_that_come_at_once_one_has_the_stream(server: RunningServer) -> None:
    for _ in range(4):
        reader = Reader(f"{server.url}/v1/completions", headers=SECRET, body={**BODY, "max_tokens": 150})
        until(lambda reader=reader: reader.n_events >= 3, 120)
        reader.leave()
        readers = [resumed(server, reader.stream_id, "") for _ in range(12)]
        ends = [each.join() for each in readers]
        assert sum(each.done for each in ends) >= 1, [each.error for each in ends]  # the last; others may have begun after its end
        assert all(each.done or each.error["code"] == "stream_lost" for each in ends)


def remembered_bytes(server: RunningServer) -> float:
    page = server.http.get("/metrics").text
    return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith("relay_resumable_log_bytes{"))


def test_a_resumable_request_is_remembered_once_and_only_what_of_it_is_read(server: RunningServer) -> None:
    body = {**BODY, "max_tokens": 3, "n": 32, "metadata": {"nobody": "r" * 1_000_000}}
    before = remembered_bytes(server)
    reader = Reader(f"{server.url}/v1/completions", headers=SECRET, body=body).join()
    assert reader.done, reader.error
    assert 0 < remembered_bytes(server) - before < 200_000


def test_a_request_that_is_too_large_to_be_remembered_is_refused_with_what_to_do(server: RunningServer) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "stream": True}
    body["chat_template_kwargs"] = {"unknown": "x" * 300_000}
    response = server.http.post("/v1/chat/completions", json=body, headers={"X-Relay-Resume": "true"})
    assert response.status_code == 413
    assert "leave out X-Relay-Resume" in response.json()["error"]["message"]
    assert server.http.post("/v1/chat/completions", json=body).status_code == 200


@pytest.mark.parametrize("bad", ["please", "short", "spaces are not taken"])
def test_a_secret_that_is_none_is_refused(server: RunningServer, bad: str) -> None:
    response = server.http.post("/v1/completions", json=BODY, headers={"X-Relay-Resume": bad})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "X-Relay-Resume")


def test_a_stream_that_was_not_opened_so_cannot_be_resumed(server: RunningServer) -> None:
    response = server.http.get("/v1/requests/nobody/stream")
    assert response.status_code == 410
    assert response.json()["error"]["code"] == "stream_lost"
    response = server.http.get("/v1/requests/nobody/stream", headers={"Last-Event-ID": "what"})
    assert response.status_code == 400


@pytest.mark.parametrize("position", ["0.100000", "1.3", "0.2;7.1"])
def test_a_position_that_no_event_of_the_stream_had_is_refused(server: RunningServer, position: str) -> None:
    reader = Reader(f"{server.url}/v1/completions", headers={**SECRET, "X-Request-ID": f"at-{position[:3]}"}, body=BODY)
    until(lambda: reader.n_events >= 3, 120)
    reader.leave()
    response = server.http.get(f"/v1/requests/at-{position[:3]}/stream", headers={**SECRET, "Last-Event-ID": position})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "Last-Event-ID"
    rest = Reader(
        f"{server.url}/v1/requests/at-{position[:3]}/stream", method="GET", headers={**SECRET, "Last-Event-ID": reader.last_id}
    ).join()
    assert rest.done


@pytest.mark.parametrize("gone", ["client", "gateways"])
def test_a_drain_waits_for_whoever_comes_back_to_a_resumable_stream(server: RunningServer, gone: str) -> None:
    body = {**BODY, "max_tokens": 300}
    whole = Reader(f"{server.url}/v1/completions", body=body).join()
    reader = Reader(f"{server.url}/v1/completions", headers={**SECRET, "X-Request-ID": f"drained-{gone}"}, body=body)
    until(lambda: reader.n_events >= 6, 120)
    leave(server, reader, gone)
    until(lambda: all_up(server), 120, server.log)
    before = pid_of(server, "decode-0")
    assert server.http.post("/admin/workers/decode-0/drain").status_code == 202
    assert Reader(f"{server.url}/v1/completions", body=BODY).join().done  # that takes a while, and the drained worker takes nothing
    assert pid_of(server, "decode-0") == before
    rest = Reader(
        f"{server.url}/v1/requests/drained-{gone}/stream", method="GET", headers={**SECRET, "Last-Event-ID": reader.last_id}
    ).join()
    assert rest.done, rest.error
    assert reader.text + rest.text == whole.text
    until(lambda: all_up(server) and pid_of(server, "decode-0") != before, 120, server.log)
    assert next(row for row in processes(server) if row["worker"] == "decode-0")["last_death"] == "drained"
