"""Our own server under load: what the client counts is what the server says."""

import json
import shlex
from pathlib import Path

from click.testing import CliRunner

from relay.cli.bench import bench
from tests.running import ROOT, running, until


def test_relay_serves_a_measured_load(smollm2_path: Path, tmp_path: Path) -> None:
    saved = tmp_path / "requests.jsonl"
    options = shlex.split("--concurrency 2 --requests 2 --prompt-tokens 40 --output-tokens 3 --shared-prefix 32 --warmup 1 --json")
    with running(ROOT / "configs" / "quickstart.yaml", tmp_path / "server") as server:
        result = CliRunner().invoke(bench, (server.url, *options, "--save-requests", str(saved)))
        assert result.exit_code == 0, result.output
        served = 2 + 1 + 2  # the probe, the warm-up, the load
        until(lambda: server.log().count('"route": "/v1/completions"') >= served, 120)
        assert server.log().count('"route": "/v1/completions"') == served
        server.assert_blocks_come_back()
    body = json.loads(result.stdout)
    assert body["requests"] == {"sent": 2, "ok": 2, "failed": 0, "failures": {}, "short": 0, "without_text": 0}
    assert (body["model"], body["workload"]["prompts"], body["workload"]["ignore_eos"]) == ("smollm2", "token_ids", True)
    assert (body["prompt_tokens"], body["output_tokens"]) == (80, 6)
    assert body["notes"] == []
    for row in map(json.loads, saved.read_text().splitlines()):
        assert 0 < row["ttft_ms"] <= row["e2e_ms"]
        assert row["chunk_ms"] == sorted(row["chunk_ms"])
        assert row["finish_reason"] == "length"
