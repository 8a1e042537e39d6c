"""`relay bench` as a user types it."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from click.testing import CliRunner, Result

from relay.cli.bench import bench
from relay.errors import StartError
from tests.bench.scripted import ScriptedServer, Step, whole
from tests.bench.test_run import steady


def sometimes(path: str, body: dict[str, object]) -> Iterator[Step]:
    """At once, and every request for three tokens fails."""
    if body["max_tokens"] == 3:
        yield whole({"error": {"message": "no"}}, "500 Internal Server Error")
    else:
        yield from (step for step in steady(path, body) if not isinstance(step, float))


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Served from a thread, because the command has the main one."""
    server = ScriptedServer(sometimes)
    begun, told = threading.Event(), threading.Event()

    async def serve() -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(server.run)
            begun.set()
            await trio.to_thread.run_sync(told.wait)
            nursery.cancel_scope.cancel()

    thread = threading.Thread(target=trio.run, args=(serve,))
    thread.start()
    assert begun.wait(10)
    yield server.url
    told.set()
    thread.join(10)


def relay_bench(*arguments: str) -> Result:
    return CliRunner().invoke(bench, arguments)


def test_json_is_one_object_on_stdout_and_nothing_else(url: str) -> None:
    result = relay_bench(url, "--concurrency", "2", "--requests", "6", "--output-tokens", "4", "--json")
    assert result.exit_code == 0, result.output
    body = json.loads(result.stdout)
    assert (body["requests"]["ok"], body["output_tokens"], body["model"]) == (6, 24, "scripted")
    assert body["mode"] == {"mode": "closed", "concurrency": 2, "requests": 6}
    assert result.stderr == ""


def test_a_table_and_a_file_of_requests(url: str, tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    result = relay_bench(
        url, "--rate", "200", "--duration", "0.2", "--output-tokens", "2:5", "--allow-failures", "--save-requests", str(path)
    )
    assert result.exit_code == 0, result.output
    assert "TTFT" in result.stdout
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) > 20
    assert {row["failure"] for row in rows} == {None, "http_500"}
    assert {row["completion_tokens"] for row in rows if row["ok"]} == {2, 4, 5}


def test_failures_are_the_exit_status_unless_allowed(url: str) -> None:
    failing = (url, "--requests", "2", "--output-tokens", "3")
    result = relay_bench(*failing)
    assert result.exit_code == 1
    assert "2 x http_500: no" in result.stdout
    assert relay_bench(*failing, "--allow-failures").exit_code == 0


def test_a_trace_is_replayed(url: str) -> None:
    trace = Path(__file__).parent.parent / "data" / "mooncake_trace.jsonl"
    result = relay_bench(url, "--trace", str(trace), "--length-scale", "1/64", "--time-scale", "0.01", "--json")
    assert result.exit_code == 0, result.output
    body = json.loads(result.stdout)
    assert body["requests"]["ok"] == 5
    assert body["prompt_tokens"] == sum(round(n / 64) for n in (2290, 2012, 915, 1053, 1477))
    assert body["mode"]["length_scale"] == "1/64"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rate", "5"], "--rate needs --duration"),
        (["--rate", "5", "--duration", "1", "--concurrency", "2"], "--concurrency does not go with --rate"),
        (["--burstiness", "2"], "--burstiness does not go with a closed loop"),
        (["--trace", "t", "--rate", "2"], "--rate does not go with --trace"),
        (["--trace", "t", "--prompt-tokens", "5"], "--prompt-tokens does not go with --trace"),
        (["--slo", "fast"], "no limit"),
        (["--prompt-tokens", "0"], "no length"),
        (["--length-scale", "1/0"], "length-scale"),
        (["--token-ids", "5"], "no range of token ids"),
        (["--concurrency", "0"], "concurrency"),
    ],
)
def test_options_that_make_no_sense_are_usage_errors(arguments: list[str], words: str) -> None:
    result = relay_bench("http://127.0.0.1:1", *arguments)
    assert result.exit_code == 2
    assert words in result.stderr


def test_no_server_is_one_clear_error() -> None:
    result = relay_bench("http://127.0.0.1:1")
    assert isinstance(result.exception, StartError)
    assert "no server answers there (connect: Connection refused)" in str(result.exception)
