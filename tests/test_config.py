"""Configs: what is right loads, what is wrong is refused with the key, the reason and the nearest name."""

from pathlib import Path

import msgspec
import pytest

from relay.config import Config, load, parse, split_bind
from relay.errors import ConfigError

GOOD = """
model: {source: model.gguf, name: m}
workers:
  - {name: prefill, roles: [prefill]}
  - {name: decode, roles: [decode], threads: 2}
"""
GPU = """
model: {source: model.gguf, name: m}
workers:
  - {name: prefill, roles: [prefill], device: cuda, count: 2}
  - {name: decode, roles: [decode], device: cuda, gpus: [1]}
  - {name: more, roles: [decode], device: cuda}
"""
CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.yaml"))


def test_defaults_fill_what_is_not_said() -> None:
    config = parse(GOOD)
    assert config.gateway.bind == "127.0.0.1:8000"
    assert config.workers[0].threads == "auto"


@pytest.mark.parametrize("path", CONFIGS, ids=[path.name for path in CONFIGS])
def test_every_config_of_the_repository_loads(path: Path) -> None:
    load(path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "expected a mapping"),
        ("[1]", "expected a mapping"),
        ("a: [", "not valid YAML"),
        ("model: {source: a, name: b, nmae: c}\nworkers: []", "unknown key `model.nmae`; did you mean `name`?"),
        (GOOD + "gatway: {}", "unknown key `gatway`; did you mean `gateway`?"),
        (GOOD + "zzz: 1", "unknown key `zzz`; known here: model, workers"),
        (GOOD.replace("threads", "thread"), "unknown key `workers[1].thread`; did you mean `threads`?"),
        (GOOD.replace("threads: 2", "threads: 0"), "threads is 0; expected `auto` or 1"),
        (GOOD.replace("threads: 2", "threads: many"), "workers"),
        (GOOD.replace("[decode]", "[dekode]"), "workers"),
        (GOOD.replace("[decode]", "[prefill]"), "no worker has the role `decode`"),
        (GOOD.replace("name: decode", "name: prefill"), "two workers are named `prefill`"),
        (GOOD.replace("name: decode", "name: router"), "a name of the server's own"),
        (GOOD.replace("[decode]", "[decode, decode]"), "names a role twice"),
        (GOOD + "gateway: {bind: nowhere}", "expected HOST:PORT"),
        (GOOD + "gateway: {workers: 0}", "gateway.workers"),
        (GOOD + "runtime: {silent_s: 0.5}", "runtime.silent_s is 0.5; expected two of runtime.heartbeat_s (0.5) at least"),
        (GOOD + "engine: {max_step_ms: fast}", "engine.max_step_ms"),
        ("model: {source: a, name: b}\nworkers: []", "workers"),
        ("workers:\n  - {name: a, roles: [prefill, decode]}", "model"),
        (GOOD + "log: {level: info}\nlog: {level: debug}", "the key `log` is there twice"),
        (GOOD.replace("name: m}", "name: m, sha256: abc}"), "sha256"),
        (GOOD + "auth: {open_routes: [/metrics]}", "auth.open_routes has no meaning without auth.keys_file"),
        (GOOD + "auth: {keys_file: k.yaml, open_routes: [/debug/kv]}", "auth.open_routes"),
        (GOOD + "cors: {allow_origins: [page.example]}", "cors.allow_origins"),
        (GOOD + "cors: {allow_origins: ['https://page.example/']}", "cors.allow_origins"),
        (GOOD + "? [1]\n: 2", "not valid YAML"),
        (GOOD.replace("threads: 2", "device: tpu"), "workers[1].device"),
        (GOOD.replace("threads: 2", "device: cuda"), "workers compute on cpu and cuda"),
        (GOOD.replace("threads: 2", "gpus: [0]"), "names gpus and computes on cpu"),
        (GPU.replace("count: 2", "gpus: [0, 1]"), "has count 1 and names 2 gpus"),
        (GPU.replace("gpus: [1]", "gpus: [-1]"), "workers[1].gpus"),
        (GPU + "engine: {runner: native}", "engine.runner is native, which computes on CPUs"),
        (GPU + "engine: {activations: a8}", "engine.activations is for CPUs"),
        (GOOD + "engine: {exact: false}", "engine.exact false asks for cuBLAS"),
        (GPU + "engine: {prefill_attention: torch}", "say engine.exact: false too"),
    ],
)
def test_a_wrong_config_is_refused_with_what_to_do(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text, where="test.yaml")
    assert says in str(caught.value)
    assert str(caught.value).startswith("test.yaml")


def test_each_worker_has_the_next_gpu_unless_it_names_one() -> None:
    assert parse(GPU).gpus() == (0, 1, 1, 3)
    assert parse(GPU).device == "cuda"
    assert parse(GOOD).gpus() == ()
    assert parse(GPU.replace("cuda", "emulated").replace(", gpus: [1]", "")).gpus() == ()


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"nowhere.yaml: cannot be read"):
        load(Path("nowhere.yaml"))


@pytest.mark.parametrize("bind", ["", "8000", "localhost", "host:", ":80", "h:99999", "h:-1", "h:8o"])
def test_a_bind_that_is_none_is_refused(bind: str) -> None:
    with pytest.raises(ConfigError, match="expected HOST:PORT"):
        split_bind(bind)


def test_an_ipv6_bind_stands_in_brackets() -> None:
    assert split_bind("[::1]:80") == ("::1", 80)


def test_nothing_writes_to_a_config() -> None:
    with pytest.raises(AttributeError):
        parse(GOOD).gateway.bind = "x"  # type: ignore[misc]


def test_every_field_says_what_it_is_for() -> None:
    def undocumented(kind: type) -> list[str]:
        missing = []
        for field in msgspec.structs.fields(kind):
            info = msgspec.inspect.type_info(field.type)
            if isinstance(info, msgspec.inspect.StructType):
                missing += undocumented(info.cls)
            elif not (isinstance(info, msgspec.inspect.Metadata) and (info.extra_json_schema or {}).get("description")):
                missing.append(f"{kind.__name__}.{field.name}")
        return missing

    assert undocumented(Config) == []
