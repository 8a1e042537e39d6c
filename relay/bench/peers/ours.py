"""Our own servers: the configs that users start with, with other activations and the number of threads that all servers get."""

import re
import sys
from pathlib import Path
from typing import Any, Final

import yaml

from relay import __version__
from relay.bench.peers.contestant import Contestant
from relay.bench.peers.verdict import aggregated
from relay.config import read_yaml

ACTIVATIONS: Final = ("a16", "a8")
CONFIGS: Final = {"quickstart.yaml": "disaggregated", "aggregated.yaml": "aggregated"}
_STARTED: Final = re.compile(r"^\s+(\S+)\s+started, pid (\d+)", re.MULTILINE)


def variants(configs: Path, folder: Path, *, threads: int, bind: dict[str, str]) -> list[Contestant]:
    """All four, their configs written to `folder`. bind: HOST:PORT by key."""
    found = []
    for file, words in CONFIGS.items():
        raw = read_yaml((configs / file).read_text(encoding="utf-8"), file)
        for activations in ACTIVATIONS:
            key = activations if words == "disaggregated" else aggregated(activations)
            path = folder / f"{key}.yaml"
            path.write_text(yaml.safe_dump(changed(raw, activations, threads), sort_keys=False), encoding="utf-8")
            command = [sys.executable, "-m", "relay", "serve", str(path), "--bind", bind[key]]
            found.append(
                Contestant(
                    key=key,
                    family="ours",
                    name=f"RelayServe {activations}, {words}",
                    version=f"relayserve-pd {__version__}",
                    command=command,
                    url=f"http://{bind[key]}",
                    ready="/readyz",
                )
            )
    return found


def changed(raw: dict[str, Any], activations: str, threads: int) -> dict[str, Any]:
    """The config with these activations, and every engine worker with so many threads."""
    workers = [{**worker, "threads": threads} for worker in raw["workers"]]
    return {**raw, "engine": {**raw.get("engine", {}), "activations": activations}, "workers": workers}


def process_names(log: str) -> dict[int, str]:
    """By process id, as `relay serve` says them when they start."""
    return {int(pid): name for name, pid in _STARTED.findall(log)}
