"""One server with keys and two gateway workers."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.http.keyed.asking import KEYS, ORIGIN, entry, gateways, key
from tests.running import ROOT, RunningServer, running, until


@pytest.fixture(scope="module")
def keys_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    path.write_text(yaml.safe_dump([entry(name, more) for name, more in KEYS.items()]))
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, keys_file: Path, smollm2_path: Path) -> Iterator[RunningServer]:
    config = yaml.safe_load((ROOT / "configs" / "aggregated.yaml").read_text())
    config["gateway"] = {"workers": 2}
    config["auth"] = {"keys_file": str(keys_file), "open_routes": ["/readyz"], "reload_s": 0.1}
    config["cors"] = {"allow_origins": [ORIGIN]}
    config["engine"] = {"kv_memory_mib": 256}
    path = keys_file.with_name("config.yaml")
    path.write_text(yaml.safe_dump(config))
    with running(path, tmp_path_factory.mktemp("server")) as server:
        server.http.headers["Authorization"] = f"Bearer {key('root')}"
        until(lambda: len(gateways(server)) == 2, 120)
        yield server
