"""Our own servers: the configs that users start with, with other activations and the number of threads that every server gets."""

import sys
from pathlib import Path
from typing import Final

import msgspec
import yaml

from relay import __version__
from relay.bench.peers.server import Server
from relay.config import read_yaml


class Variant(msgspec.Struct, frozen=True):
    """A config of `configs` with other activations; `guesses`: whether it speculates, as it does unless told otherwise."""

    file: str
    activations: str
    words: str
    guesses: bool = True


CONFIGS: Final = {
    "a16": Variant("quickstart.yaml", "a16", "disaggregated"),
    "a16-aggregated": Variant("aggregated.yaml", "a16", "aggregated"),
    "a16-plain": Variant("aggregated.yaml", "a16", "aggregated, no speculation", guesses=False),
    "a8": Variant("quickstart.yaml", "a8", "disaggregated"),
    "a8-aggregated": Variant("aggregated.yaml", "a8", "aggregated"),
}


def server(key: str, configs: Path, folder: Path, *, threads: int, port: int) -> Server:
    """key: of CONFIGS. Its config is written to `folder`."""
    variant = CONFIGS[key]
    raw = read_yaml((configs / variant.file).read_text(encoding="utf-8"), variant.file)
    workers = [{**worker, "threads": threads} for worker in raw["workers"]]
    path = folder / f"{key}.yaml"
    engine = {**raw.get("engine", {}), "activations": variant.activations, **({} if variant.guesses else {"speculative_tokens": 0})}
    changed = {**raw, "engine": engine, "workers": workers}
    path.write_text(yaml.safe_dump(changed, sort_keys=False), encoding="utf-8")
    command = [sys.executable, "-m", "relay", "serve", str(path), "--bind", f"127.0.0.1:{port}"]
    name, url = f"RelayServe {variant.activations}, {variant.words}", f"http://127.0.0.1:{port}"
    return Server(key=key, name=name, version=f"relayserve-pd {__version__}", command=command, url=url, ready="/readyz")
