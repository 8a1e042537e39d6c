"""Whole runs against a server with known delays, on a virtual clock over real sockets: the latencies must come out exactly."""

import os
import signal
from collections.abc import Iterator
from io import StringIO
from typing import Any

import msgspec
import pytest
import trio
from rich.console import Console
from trio.testing import MockClock

from relay.bench.lengths import Lengths
from relay.bench.report import Measured
from relay.bench.run import Outcome, run
from relay.bench.settings import Closed, Open, Settings
from relay.bench.slo import Slo
from relay.errors import StartError
from tests.bench.scripted import END, STREAM, ScriptedServer, Step, chunk, counted, done, event, text, usage, whole

QUIET = Console(file=StringIO())


def settings(url: str, mode: Closed | Open = Closed(1, 1), **fields: Any) -> Settings:  # noqa: B008
    values: dict[str, Any] = {
        "url": url,
        "key": None,
        "model": None,
        "endpoint": "completions",
        "mode": mode,
        "rows": [],
        "length_scale": 1.0,
        "prompt_tokens": Lengths(low=100, high=100),
        "output_tokens": Lengths(low=5, high=5),
        "shared_prefix": 0,
        "sampling": "greedy",
        "seed": 0,
        "token_ids": (1000, 2000),
        "max_context": None,
        "warmup": 0,
        "timeout_s": 60.0,
        "slo": None,
        **fields,
    }
    return Settings(**values)


def measured(server: ScriptedServer, mode: Closed | Open = Closed(1, 1), **fields: Any) -> Measured:  # noqa: B008
    return outcome(server, mode, **fields).report.measured


def outcome(server: ScriptedServer, mode: Closed | Open = Closed(1, 1), **fields: Any) -> Outcome:  # noqa: B008
    """Waiting for a socket lets the clock jump only when no byte is under way."""

    async def main() -> Outcome | None:
        async with trio.open_nursery() as nursery:
            await nursery.start(server.run)
            found = await run(settings(server.url, mode, **fields), QUIET)
            nursery.cancel_scope.cancel()
        return found

    found = trio.run(main, clock=MockClock(autojump_threshold=0.01))
    assert found is not None
    return found


def steady(path: str, body: dict[str, Any]) -> Iterator[Step]:
    """First token after 0.5 s, then one each 0.25 s, and 0.125 s until the end is told."""
    n_prompt = len(body["prompt"]) if "prompt" in body else 7
    if not body.get("stream"):
        yield counted(n_prompt)
        return
    yield STREAM
    yield 0.5
    for i in range(body["max_tokens"]):
        yield 0.25 if i else 0.0
        yield text(" word")
    yield 0.125
    yield usage(n_prompt, body["max_tokens"], cached=16)
    yield done()


def test_known_latencies_come_out_exactly() -> None:
    found = measured(ScriptedServer(steady), Closed(4, 12), slo=Slo(ttft_s=0.5, tpot_s=0.3))
    assert (found.requests.ok, found.requests.failed) == (12, 0)
    for values, seconds in ((found.ttft_ms, 0.5), (found.tpot_ms, 0.25), (found.itl_ms, 0.25), (found.e2e_ms, 1.625)):
        assert values is not None
        assert values.min == values.max == seconds * 1e3
    assert found.duration_s == 3 * 1.625
    assert found.output_tokens_per_s == pytest.approx(12 * 5 / (3 * 1.625), abs=1e-3)
    assert (found.prompt_tokens, found.cached_share) == (1200, 0.16)
    assert found.slo is not None
    assert found.slo.requests_share == 1.0


def test_prompts_are_token_ids_and_all_that_the_server_takes_is_on() -> None:
    server = ScriptedServer(steady)
    measured(server, Closed(2, 4), shared_prefix=40, warmup=2)
    assert len(server.bodies) == 6
    for body in server.bodies:
        assert {type(token) for token in body["prompt"]} == {int}
        assert len(body["prompt"]) == 100
        rest = {key: value for key, value in body.items() if key != "prompt"}
        assert rest == {
            "model": "scripted",
            "max_tokens": 5,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    assert len({tuple(body["prompt"][:40]) for body in server.bodies}) == 1
    assert len({tuple(body["prompt"]) for body in server.bodies}) == 6, "a warm-up has contents of its own"


def test_an_open_loop_counts_from_the_schedule_while_the_server_stalls() -> None:
    """It takes one request at a time, 1 s each, and more arrive: all wait, and the waiting is in their latency."""
    turn = [0.0]

    def one_at_a_time(path: str, body: dict[str, Any]) -> Iterator[Step]:
        if not body.get("stream"):
            yield counted(len(body["prompt"]))
            return
        now = trio.current_time()
        turn[0] = max(turn[0], now) + (1.0 if body["max_tokens"] > 1 else 0.0)
        yield turn[0] - now
        yield STREAM + text("a")
        yield done()

    found = outcome(ScriptedServer(one_at_a_time), Open(5.0, 1.0, 1.2), seed=4)
    records = sorted(found.records, key=lambda record: record.start_s)
    assert len(records) > 5
    starts = [record.start_s for record in records]
    for place, record in enumerate(records, 1):
        assert record.ttft_s == pytest.approx(starts[0] + place - record.start_s, abs=1e-6)
    assert found.report.measured.send_lag_ms is not None
    assert found.report.measured.send_lag_ms.max == 0.0


def failing(path: str, body: dict[str, Any]) -> Iterator[Step]:
    """Each request fails in a way of its own, told by how much it asks for."""
    if not body.get("stream") or body["max_tokens"] == 1:
        yield from steady(path, body)
        return
    match body["max_tokens"]:
        case 11:
            yield whole({"error": {"message": "the queue is full"}}, "503 Service Unavailable")
        case 12:
            yield STREAM + text("a") + event({"error": {"message": "a worker was lost"}}) + END
        case 13:
            yield STREAM + text("a") + END
        case 14:
            yield STREAM + text("a")
            yield None
        case 15:
            yield STREAM + text("a")
            yield 1000.0
        case 16:
            yield STREAM + chunk(b"data: {oops\n\n") + done()
        case 17:
            yield b"SSH-2.0-OpenSSH\r\n\r\n"
        case _:
            yield None


@pytest.mark.parametrize(
    ("asked", "kind", "words"),
    [
        (11, "http_503", "the queue is full"),
        (12, "error_event", "a worker was lost"),
        (13, "cut", "without [DONE]"),
        (14, "cut", "closed the connection"),
        (15, "timeout", "within 3 s"),
        (16, "malformed", "oops"),
        (17, "malformed", "not an HTTP/1.1 response"),
        (18, "cut", "closed the connection"),
    ],
)
def test_each_failure_is_counted_by_its_kind_with_the_words_that_came(asked: int, kind: str, words: str) -> None:
    lengths = Lengths(low=asked, high=asked)
    found = measured(ScriptedServer(failing), Closed(1, 2), output_tokens=lengths, timeout_s=3.0, slo=Slo(e2e_s=1000.0))
    assert found.requests.failures == {kind: 2}
    assert words in found.messages[kind]
    assert found.requests.ok == 0
    assert found.slo is not None
    assert found.slo.requests_share == 0.0


def test_a_server_that_goes_away_is_counted_as_connect() -> None:
    async def main() -> Outcome | None:
        server = ScriptedServer(steady)
        async with trio.open_nursery() as nursery:
            serving = trio.CancelScope()

            async def serve(*, task_status: trio.TaskStatus[None]) -> None:
                with serving:
                    await server.run(task_status=task_status)

            await nursery.start(serve)

            async def end() -> None:
                await trio.sleep(3.0)
                serving.cancel()

            nursery.start_soon(end)
            return await run(settings(server.url, Closed(1, 4)), QUIET)

    found = trio.run(main, clock=MockClock(autojump_threshold=0.01))
    assert found is not None
    assert found.report.measured.requests.ok == 1
    assert found.report.measured.requests.failures == {"connect": 2, "cut": 1}
    assert found.report.measured.messages["connect"] == "Connection refused"


def test_a_kept_connection_that_the_server_had_closed_is_no_failure() -> None:
    """It takes the second request of a connection and closes without a byte, as servers do whose keep-alive ran out just then."""
    seen: list[int] = []

    def every_second(path: str, body: dict[str, Any]) -> Iterator[Step]:
        seen.append(len(seen))
        if body.get("stream") and body["max_tokens"] > 1 and len(seen) % 2 == 0:
            yield None
        else:
            yield from steady(path, body)

    server = ScriptedServer(every_second)
    found = measured(server, Closed(1, 4))
    assert found.requests.ok == 4
    assert len(server.bodies) > 4


def test_connections_are_kept() -> None:
    server = ScriptedServer(steady)
    measured(server, Closed(3, 12))
    assert server.connections == 3


def plain(path: str, body: dict[str, Any]) -> Iterator[Step]:
    """A server of text only, two tokens a word and five of its own, that refuses every field it does not know."""
    if set(body) - {"model", "prompt", "max_tokens", "temperature", "stream"} or not isinstance(body["prompt"], str):
        yield whole({"error": {"message": "unknown field"}}, "400 Bad Request")
    elif not body.get("stream"):
        yield counted(2 * len(body["prompt"].split()) + 5)
    else:
        yield STREAM + text("a") + text("b")
        yield done()


def test_a_server_of_text_only_gets_text_of_the_right_length_and_no_field_it_refuses() -> None:
    server = ScriptedServer(plain)
    found = outcome(server, Closed(1, 3), prompt_tokens=Lengths(low=105, high=105))
    assert found.report.measured.requests.ok == 3
    assert {2 * len(body["prompt"].split()) + 5 for body in server.bodies} == {105}
    assert found.report.context.workload["prompts"] == "text"
    assert len(found.report.context.notes) == 3
    assert found.report.measured.requests.short == 3


def test_a_server_that_takes_numbers_for_something_else_gets_text() -> None:
    def numbers_are_text(path: str, body: dict[str, Any]) -> Iterator[Step]:
        prompt = body["prompt"]
        n_prompt = len(prompt.split()) if isinstance(prompt, str) else len(str(prompt))
        yield STREAM + text("a") + usage(n_prompt, 1) + done() if body.get("stream") else counted(n_prompt)

    server = ScriptedServer(numbers_are_text)
    found = outcome(server)
    assert found.report.context.workload["prompts"] == "text"
    assert "counts them otherwise" in found.report.context.notes[0]
    assert found.report.measured.prompt_tokens == 100


def test_a_response_that_stays_open_after_done_has_ended_with_it() -> None:
    def stays_open(path: str, body: dict[str, Any]) -> Iterator[Step]:
        if body["max_tokens"] == 1:
            yield from steady(path, body)
            return
        yield STREAM
        yield 0.5
        yield text("a") + chunk(b"data: [DONE]\n\n")
        yield 100.0

    found = measured(ScriptedServer(stays_open), timeout_s=3.0)
    assert found.requests.ok == 1
    assert found.e2e_ms is not None
    assert found.e2e_ms.max == 500.0


def test_chat_sends_one_message() -> None:
    server = ScriptedServer(steady)
    found = measured(server, Closed(1, 1), endpoint="chat")
    assert found.requests.ok == 1
    (message,) = server.bodies[0]["messages"]
    assert message["role"] == "user"
    assert len(message["content"].split()) > 10


def test_lengths_beyond_the_context_are_clipped_and_reported() -> None:
    server = ScriptedServer(steady, models={"data": [{"id": "small", "max_model_len": 64}]})
    found = outcome(server, Closed(1, 2))
    assert [len(body["prompt"]) for body in server.bodies] == [59, 59]
    assert msgspec.to_builtins(found.report.context.clipped) == {"requests": 2, "prompt_tokens": 82, "output_tokens": 0}


def test_an_interrupt_reports_what_was_measured_so_far() -> None:
    async def main() -> Outcome | None:
        server = ScriptedServer(steady)
        async with trio.open_nursery() as nursery:
            await nursery.start(server.run)

            async def interrupt() -> None:
                await trio.sleep(4.0)
                os.kill(os.getpid(), signal.SIGINT)

            nursery.start_soon(interrupt)
            found = await run(settings(server.url, Closed(2, 100)), QUIET)
            nursery.cancel_scope.cancel()
        return found

    found = trio.run(main, clock=MockClock(autojump_threshold=0.01))
    assert found is not None
    assert found.report.measured.interrupted
    assert (found.report.measured.requests.ok, found.report.measured.unfinished) == (4, 2)


@pytest.mark.parametrize(
    ("models", "words"),
    [({"data": []}, "lists no model"), ({"data": [{"id": "m"}]}, "no request of any kind")],
)
def test_a_server_that_cannot_be_measured_is_one_clear_error(models: Any, words: str) -> None:
    asked = []

    def refuses(path: str, body: dict[str, Any]) -> Iterator[Step]:
        asked.append(path)
        yield whole({"error": {"message": "no request of any kind"}}, "403 Forbidden")

    with pytest.RaisesGroup(pytest.RaisesExc(StartError, match=words), flatten_subgroups=True):
        outcome(ScriptedServer(refuses, models=models))
    assert len(asked) <= 1, "what is forbidden in one form is not tried in another"


def test_no_server_is_one_clear_error() -> None:
    async def main() -> None:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        port = listener.socket.getsockname()[1]
        await listener.aclose()
        await run(settings(f"http://127.0.0.1:{port}"), QUIET)

    with pytest.RaisesGroup(pytest.RaisesExc(StartError, match="no server answers there"), flatten_subgroups=True):
        trio.run(main)
