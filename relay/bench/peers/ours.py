"""Our own servers: the configs that users start with, with other activations and the number of threads that every server gets."""

import sys
from pathlib import Path
from typing import Final

import yaml

from relay import __version__
from relay.bench.peers.server import Server
from relay.config import read_yaml

CONFIGS: Final = {
    f"{activations}{suffix}": (file, activations, words)
    for activations in ("a16", "a8")
    for suffix, file, words in (("", "quickstart.yaml", "disaggregated"), ("-aggregated", "aggregated.yaml", "aggregated"))
}


def server(key: str, configs: Path, folder: Path, *, threads: int, port: int) -> Server:
    """key: of CONFIGS. Its config is written to `folder`."""
    file, activations, words = CONFIGS[key]
    raw = read_yaml((configs / file).read_text(encoding="utf-8"), file)
    workers = [{**worker, "threads": threads} for worker in raw["workers"]]
    path = folder / f"{key}.yaml"
    changed = {**raw, "engine": {**raw.get("engine", {}), "activations": activations}, "workers": workers}
    path.write_text(yaml.safe_dump(changed, sort_keys=False), encoding="utf-8")
    command = [sys.executable, "-m", "relay", "serve", str(path), "--bind", f"127.0.0.1:{port}"]
    name, url = f"RelayServe {activations}, {words}", f"http://127.0.0.1:{port}"
    return Server(key=key, name=name, version=f"relayserve-pd {__version__}", command=command, url=url, ready="/readyz")
