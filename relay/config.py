"""The YAML that launches a server, as frozen structs: one per room, every field with its unit and why it is there.

`load(path)` is the only way in. Unknown keys are refused with the nearest known name, wrong values with what was expected. Nothing writes
to a config afterwards: what is discovered at start lives in structs of its own (`relay.plan`).
"""

import difflib
import types
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
import yaml
from msgspec import Meta

from relay.errors import ConfigError

Role = Literal["prefill", "decode"]
ROLES: tuple[Role, ...] = get_args(Role)
Device = Literal["cpu", "cuda", "emulated"]


def _doc(text: str, **bounds: Any) -> Meta:
    return Meta(description=text, **bounds)


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is served."""

    source: Annotated[str, _doc("pypi:PACKAGE==VERSION/path/in/wheel, hf:ORG/NAME[@REVISION], random:NAME, a .gguf file, or a folder")]
    name: Annotated[str, _doc("the name clients use in `model`", min_length=1, max_length=128)]
    sha256: Annotated[Annotated[str, Meta(pattern="^[0-9a-f]{64}$")] | None, _doc("of the model file; a file that differs is refused")] = (
        None
    )
    max_context: Annotated[
        Annotated[int, Meta(ge=16)] | None, _doc("tokens of prompt and answer together; default: what the model was trained for")
    ] = None


class GatewayConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The HTTP side."""

    bind: Annotated[str, _doc("HOST:PORT; port 0 takes a free one")] = "127.0.0.1:8000"
    workers: Annotated[int, _doc("gateway processes; they share one listening socket", ge=1, le=64)] = 1
    max_body_mib: Annotated[float, _doc("a larger body is answered 413 without being read", gt=0)] = 8.0
    max_bodies_mib: Annotated[float, _doc("bodies that one gateway worker holds at once; beyond it: 503", gt=0)] = 256.0
    max_connections: Annotated[int, _doc("of one gateway worker; beyond it the connection that idled longest is closed", ge=16)] = 8192
    keep_alive_s: Annotated[float, _doc("how long an idle connection is kept", gt=0)] = 75.0
    write_timeout_s: Annotated[float, _doc("a client that takes nothing for so long is cancelled", gt=0)] = 60.0
    body_timeout_s: Annotated[float, _doc("the whole body must be there within this time", gt=0)] = 60.0
    keepalive_comment_s: Annotated[float, _doc("an SSE comment when a stream has been silent so long; 0 is never", ge=0)] = 10.0
    max_attempts: Annotated[int, _doc("placements of one request that may fail without a new token in between", ge=1)] = 16
    resume_grace_s: Annotated[float, _doc("a resumable stream that nobody reads goes on, and is remembered, for so long", ge=0)] = 60.0
    max_resumable_kib: Annotated[
        int, _doc("what is remembered of a resumable stream's request, its prompt above all, at most; beyond it: 413", ge=1, le=4096)
    ] = 256
    max_logs_mib: Annotated[
        float, _doc("what one decode worker remembers of resumable streams at most; without room for another: 503", gt=0)
    ] = 256.0
    poison_memory_s: Annotated[
        float, _doc("a request that killed workers is refused for so long when it is sent again; 0 is never", ge=0)
    ] = 600.0
    keep_ledgers: Annotated[int, _doc("ended requests whose ledger stays readable", ge=0)] = 4096
    max_request_mib: Annotated[
        float,
        _doc("what one request may take in a gateway's memory, by what it asks for, its log probabilities above all; beyond it: 413", gt=0),
    ] = 512.0
    max_held_mib: Annotated[float, _doc("what all requests of a gateway may take together; beyond it: 503", gt=0)] = 1024.0
    best_priority: Annotated[
        int, _doc("lowest `priority` number that a request may ask for, unless its key's entry says otherwise; lower goes first")
    ] = 0
    default_max_tokens: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        _doc("where a request gives none; default: 16 for /v1/completions, for a chat the room left in the context"),
    ] = None
    clip_max_tokens: Annotated[
        bool, _doc("a `max_tokens` beyond the room left in the context is taken as that room; false: it is refused with 400")
    ] = False


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Placement and admission."""

    placement: Annotated[
        Literal["kv_aware", "least_loaded", "round_robin"], _doc("how workers are chosen: by cached prefix and load, by load, or in turn")
    ] = "kv_aware"
    reserve_roles: Annotated[bool, _doc("workers of one role take the other too while nobody lives whose it is")] = True
    local_prefill_tokens: Annotated[int, _doc("a decode worker computes a prompt itself if so few of its tokens are not cached", ge=0)] = 0
    max_queue: Annotated[int, _doc("requests that may wait for a place, each with all its sequences; beyond it: 503", ge=0)] = 1024
    max_queue_mib: Annotated[
        float, _doc("what waiting requests may take in the router's memory; beyond it: 503, and 413 for one that would alone", gt=0)
    ] = 512.0
    queue_timeout_s: Annotated[float, _doc("a request that waited so long for a place is refused with 503", gt=0)] = 300.0
    expected_tokens: Annotated[int, _doc("tokens an answer is assumed to need before enough have been seen", ge=1)] = 256
    kv_overcommit: Annotated[float, _doc("share of the expected answer that is reserved; preemption covers the rest", ge=0, le=4)] = 1.0


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What happens in one step of a prefill or decode worker."""

    runner: Annotated[
        Literal["auto", "native", "reference"],
        _doc("who computes on CPUs: `native` is C++, `reference` torch with fixed tiles; auto: native where it can be had"),
    ] = "auto"
    activations: Annotated[
        Literal["a16", "a8"], _doc("native: inputs of matrices have 15 bits, or 8: less exact, and faster with many rows")
    ] = "a16"
    exact: Annotated[
        bool, _doc("cuda: matrices by our kernel, whose bits don't depend on the batch; false: by cuBLAS, and recovery may change tokens")
    ] = True
    prefill_attention: Annotated[
        Literal["kernel", "torch"],
        _doc(
            "cuda: attention of prompts by our kernel, or by torch's own where that is faster; its bits depend on chunks: with exact: false"
        ),
    ] = "kernel"
    peer_access: Annotated[
        bool,
        _doc(
            "cuda: KV goes straight into other workers' pools where their GPUs reach each other, else through pinned memory of the host; "
            "false: always through the host, for machines whose GPUs say that they reach each other and do not"
        ),
    ] = True
    kv_dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16", "int8"],
        _doc(
            "type of the KV cache; auto: bfloat16, the reference float32. The reference knows these two, GPUs bfloat16 and float16. What a "
            "token of text loses on SmolLM2, in nats, against float32: bfloat16 0.0012, float16 under 0.0001, int8 0.0040"
        ),
    ] = "auto"
    block_tokens: Annotated[int, _doc("tokens a KV block holds", ge=16, le=16)] = 16
    kv_memory_mib: Annotated[
        Annotated[int, Meta(ge=1)] | Literal["auto"],
        _doc("KV pool of each worker, unless the worker says otherwise; auto: 1024, on a GPU its worker's part of what is free there"),
    ] = "auto"
    gpu_memory_share: Annotated[
        float, _doc("cuda, kv_memory_mib auto: of a GPU's free memory its workers take so much together, all told", gt=0, le=1)
    ] = 0.9
    prefix_cache: Annotated[bool, _doc("keep KV of ended requests, to be found again by equal prefixes")] = True
    max_running: Annotated[int, _doc("sequences in one decode batch", ge=1, le=4096)] = 64
    first: Annotated[
        Literal["mixed", "decode", "prefill"],
        _doc(
            "what comes first. mixed: every running sequence's token, then prompts for the time that is left; decode: prompts get few rows "
            "beside running sequences (even gaps, late first tokens); prefill: those pause while prompts are computed, a few steps at most"
        ),
    ] = "mixed"
    max_step_ms: Annotated[float, _doc("prefill chunks are sized so that a step stays under this", gt=0)] = 40.0
    max_prefill_step_ms: Annotated[
        float,
        _doc(
            "the same, native, while no sequence decodes on the worker: larger chunks take less time altogether, and a step that nobody "
            "wants any more ends early",
            gt=0,
        ),
    ] = 300.0
    max_chunk_tokens: Annotated[int, _doc("prefill tokens of one step at most, whatever the time", ge=1)] = 512
    speculative_tokens: Annotated[
        int,
        _doc(
            "native: so many tokens at most are guessed from what a sequence has said before and checked in one step, while up to three "
            "sequences decode; that changes no token, only when it comes. 0: none",
            ge=0,
            le=3,
        ),
    ] = 3


class RuntimeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How actors live and talk."""

    heartbeat_s: Annotated[float, _doc("each worker says so often that it lives", gt=0)] = 0.5
    silent_s: Annotated[float, _doc("a worker without heartbeat for so long is killed; if it computes, after ten times that", gt=0)] = 2.0
    hang_s: Annotated[float, _doc("a worker whose engine step is older than this is killed", gt=0)] = 5.0
    ready_within_s: Annotated[float, _doc("time a worker has to load and be ready", gt=0)] = 120.0
    drain_s: Annotated[float, _doc("running requests get so long to end when the server stops", ge=0)] = 30.0
    readers_back_s: Annotated[
        float, _doc("a drain keeps resumable streams so long for readers that may come back, but not longer than half of drain_s", ge=0)
    ] = 5.0
    link_deadline_s: Annotated[float, _doc("a link that stays cut for so long ends in the death of one side", gt=0)] = 5.0
    max_restarts: Annotated[
        int,
        _doc(
            "deaths of one worker in `within_s`; beyond it, it rests between restarts while others have its role, else the server ends",
            ge=0,
        ),
    ] = 10
    within_s: Annotated[float, _doc("window of `max_restarts`", gt=0)] = 60.0
    first_backoff_s: Annotated[float, _doc("wait before the first restart; doubles with each further death", ge=0)] = 0.05
    most_backoff_s: Annotated[float, _doc("longest wait before a restart", ge=0)] = 5.0
    spares: Annotated[int, _doc("processes that have imported all and wait to replace a dead one; each takes some 45 MB", ge=0, le=16)] = 1
    allow_faults: Annotated[bool, _doc("for chaos tests: POST /admin/faults kills, hangs, cuts and corrupts on demand")] = False
    poison_token: Annotated[int | None, _doc("with allow_faults: a step that computes this token id kills its worker")] = None
    window: Annotated[int, _doc("messages one worker may have under way to one actor", ge=2)] = 4096


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kind of engine worker."""

    name: Annotated[str, _doc("processes are NAME-0, NAME-1, ...", pattern="^[a-z][a-z0-9_]{0,31}$")]
    roles: Annotated[tuple[Role, ...], _doc("[prefill], [decode], or both: an aggregated worker", min_length=1, max_length=2)]
    device: Annotated[
        Device,
        _doc("where it computes; the same for all workers: their pools exchange blocks. emulated: the CUDA path on the CPU, for tests"),
    ] = "cpu"
    gpus: Annotated[
        tuple[Annotated[int, Meta(ge=0)], ...],
        _doc("cuda: GPU of each of the `count` processes, by number; one may serve several. Default: each worker has the next one"),
    ] = ()
    count: Annotated[int, _doc("how many such processes", ge=1, le=64)] = 1
    threads: Annotated[int | Literal["auto"], _doc("compute threads; auto: one per core, an idle worker uses none")] = "auto"
    affinity: Annotated[tuple[int, ...], _doc("cores to stay on; empty: any")] = ()
    kv_memory_mib: Annotated[Annotated[int, Meta(ge=1)] | None, _doc("KV pool; default: engine.kv_memory_mib")] = None


class AuthConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who may use the server. Without a key file anyone who reaches it may; `/debug` and `/admin` then answer this machine only."""

    keys_file: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        _doc("what `relay keys new` writes; with it every route but /healthz asks for a key. Default: no keys"),
    ] = None
    open_routes: Annotated[
        tuple[Literal["/readyz", "/metrics"], ...], _doc("routes that ask for no key, for probes and scrapers that cannot send one")
    ] = ()
    share_prefix_cache: Annotated[
        bool,
        _doc("a prompt of one key finds what another's has left in prefix caches; then a quick answer tells that somebody sent the same"),
    ] = False
    key_share: Annotated[
        float, _doc("of gateway.max_held_mib and max_bodies_mib, what one key's requests may take; beyond it: 429", gt=0, le=1)
    ] = 0.75
    reload_s: Annotated[
        float,
        _doc(
            "the key file is looked at so often; a change counts once it has stood for one look, after twice as long at most",
            gt=0,
        ),
    ] = 2.0


class CorsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which web pages may call the server from a browser. Without origins there are no CORS headers, and browsers refuse."""

    allow_origins: Annotated[
        tuple[Annotated[str, Meta(pattern=r"^(\*|[a-z][a-z0-9+.-]*://[^/\s]+)$")], ...],
        _doc("https://HOST or https://HOST:PORT, as browsers send it; or * for any"),
    ] = ()
    allow_methods: Annotated[
        tuple[Annotated[str, Meta(pattern="^[A-Z]{1,16}$")], ...], _doc("methods that a page may use beyond what needs no leave")
    ] = ("GET", "POST", "DELETE")
    allow_headers: Annotated[
        tuple[Annotated[str, Meta(pattern=r"^(\*|[A-Za-z0-9-]{1,64})$")], ...],
        _doc("request headers that a page may send; * is any: client libraries add many of their own"),
    ] = ("*",)
    expose_headers: Annotated[
        tuple[Annotated[str, Meta(pattern="^[A-Za-z0-9-]{1,64}$")], ...], _doc("response headers that a page's script may read")
    ] = (
        "x-request-id",
        "retry-after",
        "x-ratelimit-limit-requests",
        "x-ratelimit-remaining-requests",
        "x-ratelimit-reset-requests",
        "x-ratelimit-limit-tokens",
        "x-ratelimit-remaining-tokens",
        "x-ratelimit-reset-tokens",
    )
    max_age_s: Annotated[int, _doc("browsers remember a preflight's answer so long", ge=0, le=86400)] = 600


class LogConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Logs go to standard error: readable in a terminal, JSON otherwise."""

    level: Annotated[Literal["debug", "info", "warning", "error"], _doc("least severe level that is written")] = "info"


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole server."""

    model: ModelConfig
    workers: Annotated[tuple[WorkerConfig, ...], _doc("engine workers", min_length=1)]
    gateway: GatewayConfig = GatewayConfig()
    auth: AuthConfig = AuthConfig()
    cors: CorsConfig = CorsConfig()
    router: RouterConfig = RouterConfig()
    engine: EngineConfig = EngineConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    log: LogConfig = LogConfig()

    @property
    def device(self) -> Device:
        """Of all engine workers."""
        return self.workers[0].device

    def gpus(self) -> tuple[int, ...]:
        """Number of each engine process's GPU, in the order of `workers`; empty on CPUs."""
        found: list[int] = []
        for worker in self.workers:
            if worker.device == "cuda":
                found += worker.gpus or range(len(found), len(found) + worker.count)
        return tuple(found)


class _UniqueKeyLoader(yaml.SafeLoader):
    """PyYAML keeps the last of two equal keys in silence; a config must not."""


def _mapping(loader: _UniqueKeyLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: dict[Any, None] = {}
    for key_node, _ in node.value:
        key = loader.construct_object(key_node)
        if key in seen:
            raise ConfigError(f"line {key_node.start_mark.line + 1}: the key `{key}` is there twice; keep one")
        seen[key] = None
    return loader.construct_mapping(node, deep=True)


_UniqueKeyLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)
_UniqueKeyLoader.yaml_implicit_resolvers = {  # a date stays the text that it is
    first: [(tag, shape) for tag, shape in resolvers if not tag.endswith(":timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}

T = TypeVar("T")


def schema() -> dict[str, Any]:
    """JSON schema of a config file, made of the structs; editors take it to complete and to check. `_check` knows what it cannot say."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "RelayServe", **msgspec.json.schema(Config)}


def load(path: Path) -> Config:
    """Read and validate a config file. Raises ConfigError with the file, the key and what to do."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    return parse(text, where=str(path))


def parse(text: str, *, where: str = "config") -> Config:
    """Validate YAML text. Raises ConfigError."""
    raw = read_yaml(text, where)
    if not isinstance(raw, dict):
        raise ConfigError(f"{where}: expected a mapping with `model` and `workers`, found {type(raw).__name__}")
    config = validate(raw, Config, where)
    _check(config, where)
    return config


def read_yaml(text: str, where: str) -> Any:
    """Plain data out of YAML: no key twice, dates as text. Raises ConfigError."""
    try:
        return yaml.load(text, Loader=_UniqueKeyLoader)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    except (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        # beside its own, PyYAML lets out what a wrong `!!int`, `!!bool` or `!!timestamp`, a list as a key or deep nesting raises
        raise ConfigError(f"{where}: not valid YAML: {error}") from error


def validate(raw: Any, kind: type[T], where: str) -> T:
    """Plain data as a struct, or a tuple of them; an unknown key is refused with the nearest known one. Raises ConfigError."""
    _refuse_unknown(raw, kind, where, "")
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}") from error


def _refuse_unknown(raw: Any, kind: Any, where: str, path: str) -> None:
    """msgspec would say that a key is unknown; we also say which one was meant."""
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    if get_origin(kind) in (Union, types.UnionType):
        return
    if get_origin(kind) is tuple and isinstance(raw, list):
        for i, item in enumerate(raw):
            _refuse_unknown(item, get_args(kind)[0], where, f"{path}[{i}]")
    elif isinstance(kind, type) and issubclass(kind, msgspec.Struct) and isinstance(raw, dict):
        hints = get_type_hints(kind, include_extras=True)
        known = [field.name for field in msgspec.structs.fields(kind)]
        for key, value in raw.items():
            full = f"{path}.{key}" if path else str(key)
            if key not in known:
                near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.5)
                hint = f"did you mean `{near[0]}`?" if near else f"known here: {', '.join(known)}"
                raise ConfigError(f"{where}: unknown key `{full}`; {hint}")
            _refuse_unknown(value, hints[key], where, full)


def _check(config: Config, where: str) -> None:
    """What types cannot say."""
    split_bind(config.gateway.bind, where)
    runtime = config.runtime
    if runtime.silent_s < 2 * runtime.heartbeat_s:
        raise ConfigError(
            f"{where}: a worker that is healthy would be killed: runtime.silent_s is {runtime.silent_s:g}; expected two of "
            f"runtime.heartbeat_s ({runtime.heartbeat_s:g}) at least"
        )
    if config.auth.open_routes and config.auth.keys_file is None:
        raise ConfigError(f"{where}: auth.open_routes has no meaning without auth.keys_file; leave it out, or name a key file")
    names = [worker.name for worker in config.workers]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{where}: two workers are named `{name}`; give each its own name, or use `count`")
        if name in ("gateway", "router", "supervisor"):
            raise ConfigError(f"{where}: `{name}` is a name of the server's own; name the worker otherwise")
    roles = [role for worker in config.workers for role in worker.roles]
    for role in ROLES:
        if role not in roles:
            raise ConfigError(f"{where}: no worker has the role `{role}`; add it to `roles` of one")
    for worker in config.workers:
        if len(dict.fromkeys(worker.roles)) != len(worker.roles):
            raise ConfigError(f"{where}: worker `{worker.name}` names a role twice")
        if worker.gpus and worker.device != "cuda":
            raise ConfigError(
                f"{where}: worker `{worker.name}` names gpus and computes on {worker.device}; say device: cuda, or leave them out"
            )
        if worker.gpus and len(worker.gpus) != worker.count:
            raise ConfigError(
                f"{where}: worker `{worker.name}` has count {worker.count} and names {len(worker.gpus)} gpus; name one for each"
            )
        if isinstance(worker.threads, int) and worker.threads < 1:
            raise ConfigError(f"{where}: worker `{worker.name}`: threads is {worker.threads}; expected `auto` or 1 and more")

    _check_devices(config, where)


def _check_devices(config: Config, where: str) -> None:
    devices = list(dict.fromkeys(worker.device for worker in config.workers))
    if len(devices) > 1:
        raise ConfigError(f"{where}: workers compute on {' and '.join(devices)}, which exchange no KV; give all the same device")
    if config.device != "cpu" and config.engine.runner != "auto":
        raise ConfigError(
            f"{where}: engine.runner is {config.engine.runner}, which computes on CPUs; with device: {config.device} leave it out"
        )
    if config.device == "cpu" and not config.engine.exact:
        raise ConfigError(f"{where}: engine.exact false asks for cuBLAS, which only device: cuda has; on CPUs leave it out")
    if config.engine.prefill_attention == "torch" and config.engine.exact:
        raise ConfigError(
            f"{where}: engine.prefill_attention torch keeps no law of exactness; say engine.exact: false too, on device: cuda"
        )
    if config.device != "cpu" and config.engine.activations != "a16":
        raise ConfigError(f"{where}: engine.activations is for CPUs; with device: {config.device} leave it out")


def split_bind(bind: str, where: str = "--bind") -> tuple[str, int]:
    """HOST and PORT of HOST:PORT; an IPv6 host stands in brackets. Raises ConfigError."""
    host, colon, port = bind.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{where}: bind is `{bind}`; expected HOST:PORT such as 127.0.0.1:8000 or [::1]:8000")
    return host.removeprefix("[").removesuffix("]"), int(port)
