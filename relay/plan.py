"""What a config and a model come to: which processes, which actors in them, how much memory. Made once by the root, before anything starts.

Nothing here is measured or allocated, so `relay check` can show all of it. Each worker gets its own part as the payload of `Start`.
"""

import os
from pathlib import Path
from typing import Literal

import msgspec

from relay.config import ROLES, Config, EngineConfig, Role, WorkerConfig
from relay.engine.cuda.memory_plan import FAR_BYTES, DeviceMemory, plan_memory, weight_bytes
from relay.engine.cuda.served import check_served
from relay.engine.cuda.step_limits import StepLimits
from relay.engine.native.runner import native_layout
from relay.errors import ConfigError
from relay.kernels.cuda_devices import Gpu
from relay.kv.layout import KVLayout
from relay.model.checkpoint import Checkpoint
from relay.model.load import open_checkpoint
from relay.model.size import n_weights
from relay.model.spec import ModelSpec

Runner = Literal["native", "reference", "cuda"]
_AUTO_MIB = 1024
_NOT_EXACT = "engine.exact is false: matrices by cuBLAS, whose bits depend on the batch"
_GPU_BLOCK_TYPES = ("bfloat16", "float16")


class GatewayTask(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Payload of a gateway worker. quota: the actor that asks for places of keys, where there are keys."""

    config: Config
    model_path: str
    actor: str
    quota: str | None
    max_context: int
    created: int


class RouterTask(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Payload of the router's worker. limiter: the actor that counts what keys use, where there are keys. room: tokens that the largest
    pool of each role holds."""

    config: Config
    actor: str
    limiter: str | None
    room: dict[Role, int]


class EngineTask(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Payload of a prefill, decode or aggregated worker.

    actors: by role; one in `reserve` is taken only while nobody lives whose it is. gpu: its number; None on CPUs.
    """

    config: Config
    model_path: str
    actors: dict[Role, str]
    reserve: tuple[Role, ...]
    runner: Runner
    layout: KVLayout
    threads: int
    affinity: tuple[int, ...]
    gpu: int | None


Task = GatewayTask | RouterTask | EngineTask


class PlannedWorker(msgspec.Struct, frozen=True, kw_only=True):
    """One process. `pool` is the layout of its KV memory, where it has any; `memory` all that it takes of a device."""

    name: str
    task: Task
    drain_rank: int
    pool: KVLayout | None = None
    memory: DeviceMemory | None = None

    @property
    def actors(self) -> tuple[str, ...]:
        match self.task:
            case GatewayTask(actor=actor, quota=beside) | RouterTask(actor=actor, limiter=beside):
                return (actor,) if beside is None else (actor, beside)
            case EngineTask(actors=actors):
                return tuple(actors.values())


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A whole server. `max_context` is what a request can have here.

    runner: who computes, and `why` not the native kernels, if they might. weight_bytes: of the model, held once by all engine workers
    together where `shares_weights`, and by each of them else.
    """

    config: Config
    spec: ModelSpec
    runner: Runner
    why: str
    weight_bytes: int
    max_context: int
    workers: tuple[PlannedWorker, ...]
    gpus_here: tuple[Gpu, ...] = ()

    @property
    def total_bytes(self) -> int:
        pools = [worker.pool.pool_bytes for worker in self.workers if worker.pool is not None]
        return sum(pools) + self.weight_bytes * (1 if self.shares_weights else len(pools))

    @property
    def shares_weights(self) -> bool:
        return self.runner == "native"

    def gpu_bytes(self) -> dict[int, int]:
        """What the config takes of each GPU, by its number."""
        found: dict[int, int] = {}
        for worker in self.workers:
            if isinstance(worker.task, EngineTask) and worker.task.gpu is not None and worker.memory is not None:
                found[worker.task.gpu] = found.get(worker.task.gpu, 0) + worker.memory.total
        for number in found:
            found[number] += FAR_BYTES * _strangers(number, self.config.gpus(), self.gpus_here)
        return found

    def routes(self) -> str:
        """How KV gets from worker to worker, in words; empty on CPUs."""
        config = self.config
        if config.device == "cpu":
            return ""
        if not config.engine.peer_access:
            return "through pinned memory of the host (engine.peer_access is false)"
        pairs = apart(config.gpus(), self.gpus_here)
        straight = "straight into the other worker's pool"
        if config.device == "cuda" and not self.gpus_here and len(set(config.gpus())) > 1:
            return f"{straight}; through pinned memory of the host between GPUs that don't reach each other (there are none here to ask)"
        if not pairs:
            return straight
        return f"{straight}, but through pinned memory of the host from GPU {', '.join(f'{one} to {other}' for one, other in pairs)}"


def apart(numbers: tuple[int, ...], gpus_here: tuple[Gpu, ...]) -> tuple[tuple[int, int], ...]:
    """Pairs of these GPUs of which the first has no access to the memory of the second, as far as they are here to be asked."""
    each = tuple(dict.fromkeys(number for number in numbers if number < len(gpus_here)))
    return tuple((one, other) for one in each for other in each if one != other and other not in gpus_here[one].peers)


def _strangers(number: int, numbers: tuple[int, ...], gpus_here: tuple[Gpu, ...]) -> int:
    """Workers on other GPUs that open a context of their own on this one."""
    return sum(number in (there for own, there in apart(numbers, gpus_here) if own == one) for one in numbers)


def make_plan(config: Config, model_path: Path, created: int, packed_bytes: int | None, why: str, gpus_here: tuple[Gpu, ...] = ()) -> Plan:
    """`packed_bytes` of the model as the native kernels have it; None, and `why`, if they cannot serve it. gpus_here: where it computes on
    GPUs, and there are any to ask.

    Raises ModelError for a model that is not served, ConfigError for a pool too small to serve with, or memory that is not there.
    """
    if not config.engine.peer_access:
        gpus_here = tuple(msgspec.structs.replace(gpu, peers=()) for gpu in gpus_here)
    checkpoint = open_checkpoint(model_path)
    spec = checkpoint.spec
    runner: Runner = "cuda" if config.device != "cpu" else "reference" if packed_bytes is None else "native"
    engines: list[PlannedWorker] = []
    gpus = config.gpus()
    counts: dict[Role, int] = {}
    in_reserve = {role: sum(worker.count for worker in config.workers if role in worker.roles) for role in ROLES}
    for worker in config.workers:
        for number in range(worker.count):
            actors: dict[Role, str] = {}
            for role in worker.roles:
                actors[role] = f"{role}/{counts.get(role, 0)}"
                counts[role] = counts.get(role, 0) + 1
            reserve = tuple(role for role in ROLES if role not in worker.roles) if config.router.reserve_roles else ()
            for role in reserve:
                actors[role] = f"{role}/{in_reserve[role]}"
                in_reserve[role] += 1
            gpu = gpus[len(engines)] if gpus else None
            mib = worker.kv_memory_mib or config.engine.kv_memory_mib
            one = _layout(config, spec, runner)
            memory = (_AUTO_MIB if mib == "auto" else mib) << 20
            if mib == "auto" and gpu is not None and gpu < len(gpus_here):
                memory = _part_of_gpu(config, checkpoint, one, gpu, gpus_here)
            layout = _sized(worker, one, memory)
            task = EngineTask(
                config=config,
                model_path=str(model_path),
                actors=actors,
                reserve=reserve,
                runner=runner,
                layout=layout,
                threads=threads_of(worker),
                affinity=worker.affinity,
                gpu=gpu,
            )
            taken = _device_memory(config, checkpoint, layout) if runner == "cuda" else None
            engines.append(PlannedWorker(name=f"{worker.name}-{number}", task=task, drain_rank=2, pool=layout, memory=taken))
    wanted = config.model.max_context or spec.max_context
    if wanted > spec.max_context:
        raise ConfigError(f"model.max_context is {wanted}, and the model was trained for {spec.max_context} tokens; ask for no more")
    room = _largest_pools(engines)
    max_context = min(wanted, *room.values())
    has_keys = config.auth.keys_file is not None
    gateways = [
        PlannedWorker(
            name=f"gateway-{i}",
            task=GatewayTask(
                config=config,
                model_path=str(model_path),
                actor=f"gateway/{i}",
                quota=f"quota/{i}" if has_keys else None,
                max_context=max_context,
                created=created,
            ),
            drain_rank=0,
        )
        for i in range(config.gateway.workers)
    ]
    router = PlannedWorker(
        name="router-0",
        task=RouterTask(config=config, actor="router/0", limiter="limiter/0" if has_keys else None, room=room),
        drain_rank=1,
    )
    plan = Plan(
        config=config,
        spec=spec,
        runner=runner,
        why=_NOT_EXACT if runner == "cuda" and not config.engine.exact else why,
        weight_bytes=weight_bytes(checkpoint) if runner == "cuda" else packed_bytes or 4 * n_weights(spec),
        max_context=max_context,
        workers=(*gateways, router, *engines),
        gpus_here=gpus_here,
    )
    _check_room(gpus_here, plan.gpu_bytes())
    return plan


def step_limits(config: Config, spec: ModelSpec, layout: KVLayout) -> StepLimits:
    """Of a worker with this pool: no sequence is longer than it."""
    engine = config.engine
    context = min(config.model.max_context or spec.max_context, layout.n_blocks * layout.block_tokens)
    return StepLimits(engine.max_running, engine.max_chunk_tokens, context)


def _device_memory(config: Config, checkpoint: Checkpoint, layout: KVLayout) -> DeviceMemory:
    check_served(checkpoint.spec)
    limits = step_limits(config, checkpoint.spec, layout)
    return plan_memory(checkpoint, layout, limits) if config.device == "cuda" else plan_memory(checkpoint, layout, limits, itself=0)


def threads_of(worker: WorkerConfig) -> int:
    """`auto` is every core that it may run on: an idle worker uses none of them."""
    if worker.threads != "auto":
        return worker.threads
    return len(worker.affinity) or len(os.sched_getaffinity(0))


def _part_of_gpu(config: Config, checkpoint: Checkpoint, one: KVLayout, number: int, gpus_here: tuple[Gpu, ...]) -> int:
    """KV bytes of one of the workers there: what its part of the free memory has left beside all else. Raises ConfigError."""
    gpu, numbers = gpus_here[number], config.gpus()
    n_workers = numbers.count(number)
    wanted = config.model.max_context or checkpoint.spec.max_context
    longest = msgspec.structs.replace(one, n_blocks=one.blocks_for(wanted))
    others = _device_memory(config, checkpoint, longest).total - longest.pool_bytes
    part = (int(config.engine.gpu_memory_share * gpu.free) - FAR_BYTES * _strangers(number, numbers, gpus_here)) // n_workers
    if part - others < 2 * one.block_bytes:
        raise ConfigError(
            f"a {gpu.name} has {gpu.free >> 20} MiB free, and {n_workers} worker(s) take {others >> 20} MiB each beside the KV pool; "
            "take another GPU, fewer workers on it, or less of engine.max_running, engine.max_chunk_tokens and model.max_context"
        )
    return part - others


def _check_room(gpus_here: tuple[Gpu, ...], taken: dict[int, int]) -> None:
    """Raises ConfigError for a GPU that has less free than it is asked for."""
    for number, n_bytes in taken.items():
        if number < len(gpus_here) and n_bytes > gpus_here[number].free:
            free = gpus_here[number].free >> 20
            raise ConfigError(f"GPU {number} has {free} MiB free, and its workers take {n_bytes >> 20}; give them less kv_memory_mib")


def _layout(config: Config, spec: ModelSpec, runner: Runner) -> KVLayout:
    """Of a single block."""
    engine = config.engine
    if runner == "cuda":
        dtype = "bfloat16" if engine.kv_dtype == "auto" else engine.kv_dtype
        if dtype not in _GPU_BLOCK_TYPES:
            raise ConfigError(f"engine.kv_dtype is {dtype}, which the GPU kernels do not know; use {' or '.join(_GPU_BLOCK_TYPES)}")
        one = _token_major(spec, engine, dtype)
    elif runner == "native":
        one = native_layout(spec, "bfloat16" if engine.kv_dtype == "auto" else engine.kv_dtype, 1)
    else:
        dtype = "float32" if engine.kv_dtype == "auto" else engine.kv_dtype
        if dtype not in ("float32", "bfloat16"):
            raise ConfigError(f"engine.kv_dtype is {dtype}, which the reference runner does not know; use float32 or bfloat16")
        one = _token_major(spec, engine, dtype)
    return one


def _sized(worker: WorkerConfig, one: KVLayout, memory: int) -> KVLayout:
    """With as many blocks as fit into so many bytes."""
    n_blocks = memory // one.block_bytes
    if n_blocks < 2:
        need = -(-2 * one.block_bytes >> 20)
        raise ConfigError(
            f"worker `{worker.name}`: kv_memory_mib is {memory >> 20}, and two blocks of this model take {need} MiB; give it more"
        )
    return msgspec.structs.replace(one, n_blocks=n_blocks)


def _token_major(spec: ModelSpec, engine: EngineConfig, dtype: str) -> KVLayout:
    return KVLayout(
        n_layers=spec.n_layers,
        n_kv_heads=spec.n_kv_heads,
        head_dim=spec.head_dim,
        block_tokens=engine.block_tokens,
        dtype=dtype,
        n_blocks=1,
    )


def _largest_pools(engines: list[PlannedWorker]) -> dict[Role, int]:
    """Tokens that the largest pool of each role holds; a request needs one of each."""
    largest: dict[Role, int] = {}
    for worker in engines:
        assert isinstance(worker.task, EngineTask)
        for role in worker.task.actors.keys() - worker.task.reserve:
            largest[role] = max(largest.get(role, 0), worker.task.layout.n_blocks * worker.task.layout.block_tokens)
    return largest
