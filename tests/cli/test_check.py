"""`relay check` explains on any machine what would start; `relay serve` refuses in one line what cannot."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from click.testing import CliRunner, Result

from relay.cli import cli
from relay.config import Config, load
from relay.errors import ConfigError, ModelError
from relay.kernels.emulator.runtime import EmulatedRuntime
from relay.model.source import resolve
from tests.running import ROOT

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


def check(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["check", *arguments], catch_exceptions=False)


@pytest.mark.parametrize("path", CONFIGS, ids=[path.name for path in CONFIGS])
def test_every_config_of_the_repository_is_explained(path: Path, smollm2_path: Path) -> None:
    result = check(str(path))
    assert result.exit_code == 0
    config = load(path)
    for worker in config.workers:
        for number in range(worker.count):
            assert f"{worker.name}-{number} " in result.stdout
    assert "quota/" not in result.stdout
    assert "llama, 30 layers" in result.stdout


def test_more_memory_than_there_is_is_refused(tmp_path: Path, smollm2_path: Path) -> None:
    config = tmp_path / "huge.yaml"
    config.write_text((ROOT / "configs" / "quickstart.yaml").read_text() + "engine: {kv_memory_mib: 100000000}\n")
    with pytest.raises(ConfigError, match=r"pools and weights take .* MiB, processes some .*, and this machine has"):
        check(str(config))


def test_a_gpu_config_is_explained_without_a_gpu(smollm2_path: Path) -> None:
    """The memory of both processes is on one device, part by part, and the sum is that of the parts."""
    text = check(str(ROOT / "configs" / "cuda-disaggregated.yaml")).stdout
    assert "by the cuda runner" in text
    assert text.count("GPU 0 │") == 2
    parts = re.findall(r"^(?:prefill|decode)-0 +(\d+) MiB: weights 146, (.*)$", text, re.MULTILINE)
    assert len(parts) == 2
    for total, others in parts:
        numbers = [int(part.rpartition(" ")[2]) for part in others.split(", ")]
        assert len(numbers) == 6
        assert "CUDA itself and 18 graphs 1024" in others
        assert abs(146 + sum(numbers) - int(total)) <= 4
    in_all = re.search(r"^GPU 0 +(\d+) MiB in all$", text, re.MULTILINE)
    assert in_all is not None
    assert abs(int(in_all[1]) - 2 * int(parts[0][0])) <= 2
    assert "GPUs here   " in text
    assert "KV goes     straight into the other worker's pool\n" in text
    if not torch.cuda.is_available():
        assert "KV goes     straight into the other worker's pool; through pinned" in check(str(ROOT / "configs" / "cuda-1p1d.yaml")).stdout


def test_actors_that_keys_bring_are_listed_where_they_run(tmp_path: Path, smollm2_path: Path) -> None:
    path = tmp_path / "keyed.yaml"
    path.write_text((ROOT / "configs" / "two-by-two.yaml").read_text() + "auth: {keys_file: keys.yaml}\n")
    lines = {line.split()[0]: line for line in check(str(path)).stdout.splitlines() if "│" in line}
    assert "gateway/0, quota/0" in lines["gateway-0"]
    assert "gateway/1, quota/1" in lines["gateway-1"]
    assert "router/0, limiter/0" in lines["router-0"]
    assert "prefill/0, (decode/2)" in lines["prefill-0"]


def test_the_schema_has_every_field_with_its_meaning() -> None:
    schema = json.loads(check("--schema").stdout)
    assert schema["$schema"].endswith("2020-12/schema")

    def fields(kind: type) -> None:
        shown = schema["$defs"][kind.__name__]
        assert shown["additionalProperties"] is False
        assert shown["description"]
        for field in msgspec.structs.fields(kind):
            entry = shown["properties"][field.name]
            info = msgspec.inspect.type_info(field.type)
            if isinstance(info, msgspec.inspect.StructType):
                fields(info.cls)
            else:
                assert entry["description"], f"{kind.__name__}.{field.name}"
            assert ("default" in entry) != (field.name in shown["required"] if "required" in shown else False), field.name

    fields(Config)
    assert "gpus" in schema["$defs"]["WorkerConfig"]["properties"]


def test_a_server_without_its_gpu_is_refused_in_one_line(tmp_path: Path) -> None:
    """Before anything is fetched or started. On a machine that has GPUs, one that it does not have is asked for."""
    config = tmp_path / "far.yaml"
    config.write_text((ROOT / "configs" / "cuda-disaggregated.yaml").read_text().replace("gpus: [0]", "gpus: [99]"))
    command = [sys.executable, "-m", "relay", "serve", str(config), "--bind", "127.0.0.1:0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=60)
    assert done.returncode == 1
    assert re.fullmatch(r"relay: the config computes on (GPU 99, and there are \d+|GPUs: ).*; .*device: cpu serves without\n", done.stderr)
    assert "started" not in done.stdout


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
@pytest.mark.parametrize("device", ["cuda", "emulated"])
def test_a_device_under_expandable_segments_is_refused_in_one_line(tmp_path: Path, name: str, device: str) -> None:
    """Before anything is fetched, or the GPU asked for: no handle could name such memory."""
    config = tmp_path / "device.yaml"
    config.write_text(f"model: {{source: nowhere, name: m}}\nworkers: [{{name: engine, roles: [prefill, decode], device: {device}}}]\n")
    setting = "max_split_size_mb:64, expandable_segments:True"
    command = [sys.executable, "-m", "relay", "serve", str(config), "--bind", "127.0.0.1:0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=60, env={**os.environ, name: setting})
    assert done.returncode == 1
    assert done.stdout.strip() == ""
    assert done.stderr.startswith(f"relay: the environment variable {name} is `{setting}`: ")
    assert done.stderr.endswith("take expandable_segments out of it\n")


def test_a_runtime_under_expandable_segments_is_refused_and_under_other_settings_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False,max_split_size_mb:64")
    EmulatedRuntime(())
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    with pytest.raises(ConfigError, match="PYTORCH_ALLOC_CONF is `expandable_segments:True`"):
        EmulatedRuntime(())


def test_a_chat_template_that_no_gateway_could_read_is_refused(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(resolve("random:tiny-llama", sha256=None), model)
    (model / "chat_template.jinja").write_text("{% if %}")
    config = tmp_path / "config.yaml"
    config.write_text(f"model: {{source: {model}, name: m}}\nworkers: [{{name: engine, roles: [prefill, decode]}}]\n")
    with pytest.raises(ModelError, match="template"):
        check(str(config))
