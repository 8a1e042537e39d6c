"""Variants of the configs that users start with."""

from pathlib import Path

from relay.bench.peers.ours import process_names, variants
from relay.config import load
from tests.running import ROOT


def test_all_variants_are_configs_with_their_activations_and_threads(tmp_path: Path) -> None:
    keys = ("a16", "a8", "a16-aggregated", "a8-aggregated")
    found = variants(ROOT / "configs", tmp_path, threads=2, bind={key: f"127.0.0.1:{i + 1}" for i, key in enumerate(keys)})
    assert [one.key for one in found] == list(keys)
    for one in found:
        config = load(tmp_path / f"{one.key}.yaml")
        assert config.engine.activations == one.key.partition("-")[0]
        assert [worker.threads for worker in config.workers] == [2] * (1 if "aggregated" in one.key else 2)
        assert one.command[-1] == one.url.removeprefix("http://")
    assert load(tmp_path / "a8-aggregated.yaml").engine.kv_memory_mib == 2048


def test_processes_are_named_as_the_server_says_them() -> None:
    log = "RelayServe: smollm2 on http://127.0.0.1:1, 4 processes\n  gateway-0    started, pid 12\n  decode-0     started, pid 345\n"
    assert process_names(log) == {12: "gateway-0", 345: "decode-0"}
