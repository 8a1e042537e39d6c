"""What every client and operator relies on beside the text: IDs, errors, ledgers, metrics, limits, disconnects."""

import concurrent.futures
import json
import re
import socket
import time
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.running import RunningServer, until

BODY = {"prompt": "Once upon a time", "max_tokens": 4, "temperature": 0}


def raw(server: RunningServer, data: bytes, *, wait_s: float = 10.0) -> bytes:
    """Send bytes as they are; return what comes until the server closes or falls silent."""
    parts = urlsplit(server.url)
    with socket.create_connection((parts.hostname, parts.port), timeout=wait_s) as sock:
        sock.sendall(data)
        answer = b""
        while b"\r\n\r\n" not in answer or not answer.split(b"\r\n\r\n", 1)[1]:
            part = sock.recv(65536)
            if not part:
                break
            answer += part
        return answer


def metric(server: RunningServer, name: str) -> float:
    """The sum of a metric's samples over all workers."""
    page = server.http.get("/metrics").text
    return sum(float(value) for value in re.findall(rf"^{name}(?:\{{[^}}]*\}})? (\S+)$", page, re.MULTILINE))


def test_health_and_readiness(server: RunningServer) -> None:
    assert server.http.get("/healthz").json() == {"status": "ok"}
    assert server.http.get("/readyz").json() == {"status": "ready"}


def test_the_model_is_listed(server: RunningServer) -> None:
    listed = server.http.get("/v1/models").json()
    assert [model["id"] for model in listed["data"]] == ["smollm2"]
    assert server.http.get("/v1/models/smollm2").json() == listed["data"][0]
    assert server.http.get("/v1/models/other").status_code == 404


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nowhere", 404), ("GET", "/v1/completions", 405), ("POST", "/healthz", 405), ("DELETE", "/v1/chat/completions", 405)],
)
def test_wrong_routes_and_methods_get_typed_errors(server: RunningServer, method: str, path: str, status: int) -> None:
    response = server.http.request(method, path)
    assert response.status_code == status
    assert response.json()["error"]["message"]
    assert response.headers["x-request-id"]
    assert response.headers.get("allow") == {"/v1/completions": "POST", "/healthz": "GET, HEAD", "/v1/chat/completions": "POST"}.get(path)


def test_a_clients_request_id_is_echoed_and_logged(server: RunningServer) -> None:
    response = server.http.post("/v1/completions", json=BODY, headers={"X-Request-ID": "my-id.1:2"})
    assert response.headers["x-request-id"] == "my-id.1:2"
    ledger = server.http.get("/v1/requests/my-id.1:2/ledger").json()
    assert ledger["client_request_id"] == "my-id.1:2"
    assert ledger["request_id"] in server.log()
    assert server.http.get(f"/v1/requests/{ledger['request_id']}/ledger").json() == ledger


@pytest.mark.parametrize("bad", ["x" * 129, "with space", "ünï", "a/b", ""])
def test_an_id_that_is_none_is_replaced(server: RunningServer, bad: str) -> None:
    """vllm#10968: a client's ID is bounded, and never a header of its own choosing."""
    response = server.http.get("/healthz", headers={b"X-Request-ID": bad.encode("latin-1")})
    assert re.fullmatch(r"r[0-9a-f]{10}-\d+-[0-9a-f]{20}", response.headers["x-request-id"])


def test_two_live_requests_with_one_client_id_both_work(server: RunningServer) -> None:
    """vllm#10583."""

    def ask(_: int) -> httpx.Response:
        return httpx.post(f"{server.url}/v1/completions", json={**BODY, "max_tokens": 12}, headers={"X-Request-ID": "twice"}, timeout=300)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(ask, range(2)))
    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[0].json()["choices"] == answers[1].json()["choices"]


@pytest.mark.parametrize("stream", [False, True])
def test_the_ledger_closes(server: RunningServer, stream: bool) -> None:
    response = server.http.post("/v1/completions", json={**BODY, "max_tokens": 12, "stream": stream})
    ledger = server.http.get(f"/v1/requests/{response.headers['x-request-id']}/ledger").json()
    assert sum(ledger["spans"].values()) == ledger["wall_ns"]
    assert sum(ledger["ttft_spans"].values()) == ledger["ttft_ns"] <= ledger["wall_ns"]
    assert ledger["spans"]["unaccounted"] <= max(0.01 * ledger["wall_ns"], 200_000)
    assert ledger["violations"] == 0
    assert ledger["completion_tokens"] == 12
    for span in ("gateway.body", "gateway.tokenize", "hop", "route.decide", "prefill.floor", "decode.floor"):
        assert ledger["spans"][span] > 0, span


def test_refused_requests_have_a_ledger_too(server: RunningServer) -> None:
    response = server.http.post("/v1/completions", json={"prompt": ""})
    ledger = server.http.get(f"/v1/requests/{response.headers['x-request-id']}/ledger").json()
    assert ledger["status"] == 400
    assert ledger["error"] == "invalid_request"
    assert sum(ledger["spans"].values()) == ledger["wall_ns"]


def test_an_unknown_ledger_is_404(server: RunningServer) -> None:
    assert server.http.get("/v1/requests/nobody/ledger").status_code == 404


def test_metrics_count_tokens_and_keep_the_parts_apart(server: RunningServer) -> None:
    before = {name: metric(server, name) for name in ("relay_generated_tokens_total", "gen_ai_server_time_to_first_token_seconds_count")}
    server.http.post("/v1/completions", json=BODY)
    assert metric(server, "relay_generated_tokens_total") == before["relay_generated_tokens_total"] + 4
    assert (
        metric(server, "gen_ai_server_time_to_first_token_seconds_count") == before["gen_ai_server_time_to_first_token_seconds_count"] + 1
    )
    page = server.http.get("/metrics").text
    for name in ("queue", "prefill", "transfer", "decode", "inter_token"):
        assert f"relay_{name}_seconds_bucket" in page
    assert 'relay_kv_blocks{state="free",worker="decode-0"}' in page
    assert 'relay_kv_blocks{state="free",worker="prefill-0"}' in page
    assert page.count("# TYPE relay_steps_total counter") == 1
    assert metric(server, "relay_requests_in_flight") == 0
    assert metric(server, 'relay_attempts_total{event="violation",worker="gateway-0"}'.replace("{", r"\{").replace("}", r"\}")) == 0


def test_kv_pools_are_shown(server: RunningServer) -> None:
    pools = server.kv()
    assert sorted(pools) == ["decode-0", "prefill-0"]
    for pool in pools.values():
        assert pool["free"] + pool["cached"] + pool["leased"] + pool["running"] + pool["quarantined"] == pool["total"]


def test_a_body_over_the_cap_is_refused_unread(server: RunningServer) -> None:
    """hypercorn has no cap: the application's own counter decides."""
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9999999999\r\n\r\nabcde"
    answer = raw(server, head.encode())
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"body_too_large" in answer
    response = server.http.post("/v1/completions", content=b"x" * (9 << 20))
    assert response.status_code == 413


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"garbage\r\n\r\n", 400),
        (b"GET /healthz HTTP/1.1\r\n\r\n", 400),
        (b"GET /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n", 400),
        (b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-Big: " + b"x" * 100_000 + b"\r\n\r\n", 431),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
    ],
)
def test_what_is_no_http_gets_a_body_and_an_id(server: RunningServer, data: bytes, status: int) -> None:
    answer = raw(server, data)
    assert answer.startswith(b"HTTP/1.1 %d" % status), answer[:200]
    assert b"x-request-id: r" in answer
    assert json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"]["message"]


@pytest.mark.parametrize(
    "headers",
    [
        b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AA\r\n",  # hypercorn#51 and its missing back-pressure
        b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n",
    ],
)
def test_an_upgrade_is_not_taken(server: RunningServer, headers: bytes) -> None:
    answer = raw(server, b"GET /v1/models HTTP/1.1\r\nHost: x\r\n" + headers + b"\r\n")
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"x-request-id: r" in answer


@pytest.mark.parametrize("target", [b"http://somewhere:80/healthz", b"HTTP://x/healthz?a=b"])
def test_a_target_may_be_a_whole_url(server: RunningServer, target: bytes) -> None:
    assert raw(server, b"GET " + target + b" HTTP/1.1\r\nHost: x\r\n\r\n").startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_stops_its_request(server: RunningServer, stream: bool) -> None:
    """llama.cpp#9273, vllm#54947, hypercorn#210: also without streaming."""
    before = metric(server, "relay_decode_rows_computed_total")
    parts = urlsplit(server.url)
    body = json.dumps({"prompt": "Tell me a very long story.", "max_tokens": 2000, "stream": stream, "ignore_eos": True}).encode()
    sock = socket.create_connection((parts.hostname, parts.port))
    sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    until(lambda: metric(server, "relay_decode_rows_computed_total") > before + 2, 120)
    sock.close()
    server.assert_blocks_come_back()
    assert metric(server, "relay_decode_rows_computed_total") < before + 1000
    assert metric(server, "relay_requests_in_flight") == 0


def test_a_connection_is_kept_and_used_again(server: RunningServer) -> None:
    with httpx.Client(base_url=server.url) as client:
        for _ in range(3):
            assert client.post("/v1/completions", json=BODY, timeout=300).status_code == 200


def test_two_hundred_cancelled_requests_leave_every_block_free(server: RunningServer) -> None:
    """At random moments: queued, prefilling, handed over, decoding, nearly done. Nothing else comes after them."""
    import random

    parts = urlsplit(server.url)
    draw = random.Random(5)

    def leave_early(n: int) -> None:
        body = json.dumps({"prompt": "word " * draw.randint(1, 60), "max_tokens": 50, "stream": n % 2 == 0, "ignore_eos": True}).encode()
        with socket.create_connection((parts.hostname, parts.port)) as sock:
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            sock.settimeout(draw.choice((0.001, 0.02, 0.1, 0.3, 0.6)))
            try:
                while sock.recv(65536):
                    if draw.random() < 0.3:
                        break
            except TimeoutError:
                pass

    with concurrent.futures.ThreadPoolExecutor(20) as pool:
        list(pool.map(leave_early, range(200)))
    started = time.monotonic()
    server.assert_blocks_come_back()
    took = time.monotonic() - started
    print(f"every block was back {took:.2f} s after the last client left")
    assert "defect" not in server.log()


def test_one_hundred_streams_at_once_are_all_whole(server: RunningServer) -> None:
    """Each well formed, none mixed up with another: equal prompts give equal answers."""

    def ask(n: int) -> tuple[str, str, int]:
        body = {"prompt": f"Number {n % 10} is", "max_tokens": 64, "temperature": 0, "stream": True, "ignore_eos": True}
        body |= {"stream_options": {"include_usage": True}}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=300) as response:
            assert response.status_code == 200
            text = response.read().decode()
        parts = text.split("\n\n")
        assert parts[-2:] == ["data: [DONE]", ""]
        events: list[dict[str, Any]] = [json.loads(part.removeprefix("data: ")) for part in parts[:-2] if not part.startswith(":")]
        finishes = [event["choices"][0]["finish_reason"] for event in events if event["choices"] and event["choices"][0]["finish_reason"]]
        assert len(finishes) == 1
        return "".join(e["choices"][0]["text"] for e in events if e["choices"]), finishes[0], events[-1]["usage"]["completion_tokens"]

    with concurrent.futures.ThreadPoolExecutor(100) as pool:
        answers = list(pool.map(ask, range(100)))
    assert {(reason, n) for _, reason, n in answers} == {("length", 64)}
    for n in range(10):
        assert len({answers[i][0] for i in range(n, 100, 10)}) == 1
