"""A worker process, `python -m relay.worker CONTROL_FD ROOT_PID`: what lives in it is decided by the payload of its `Start`.

This and `relay.serve` are the only places that know every actor. Imports are by task: a gateway or a router never imports torch.
"""

import os
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import structlog
import trio

from relay import log
from relay.messages import Address
from relay.plan import EngineTask, GatewayTask, RouterTask, Task
from relay.runtime.frames import Start
from relay.runtime.host import Host, Hosted, run_host
from relay.runtime.node import Context

if TYPE_CHECKING:
    from relay.engine.measured import Measured
    from relay.engine.start import Compute
    from relay.faults import Faults
    from relay.kv.memory import KVMemory
    from relay.kv.pools import Map

_READERS_SHARE = 0.5  # of runtime.drain_s: so long, at most, a drain keeps resumable streams for readers that may come back
_WRITTEN_WITHIN_S = 0.5  # answers on their way to clients, when a gateway ends
_POPULATE_BYTES, _POPULATE_EVERY_S = 2 << 20, 0.005
_TASK = msgspec.msgpack.Decoder(Task)
_WANTED = msgspec.msgpack.Decoder(tuple[str, str, str])  # `relay.http.resume.Wanted`, which an engine need not import


class Laps:
    """Milliseconds of the parts of a start, each from the end of the one before."""

    def __init__(self) -> None:
        self.ms: dict[str, float] = {}
        self._last = time.monotonic_ns()

    def end(self, name: str) -> None:
        now = time.monotonic_ns()
        self.ms[name], self._last = round((now - self._last) / 1e6, 1), now


def assemble(start: Start, fds: dict[str, int], host: Host) -> Hosted:
    """Load what the task needs, and say what runs. Takes as long as it takes: limits count from Ready."""
    task = _TASK.decode(start.payload)
    log.configure(start.worker, level=task.config.log.level)
    faults = None
    if task.config.runtime.allow_faults:
        from relay.faults import Faults

        faults = Faults(host)
    match task:
        case GatewayTask():
            hosted = _gateway(task, fds, host)
        case RouterTask():
            hosted = _router(task)
        case EngineTask():
            hosted = _engine(task, fds, host, faults)
    return hosted if faults is None else replace(hosted, on_ask=faults.listening(hosted.on_ask))


def _gateway(task: GatewayTask, fds: dict[str, int], host: Host) -> Hosted:
    import gc

    from relay.actors.gateway import GatewayActor
    from relay.actors.quota import QuotaActor
    from relay.auth.keyfile import KeyFile
    from relay.auth.metrics import KeyMetrics
    from relay.errors import Draining, Unavailable
    from relay.http.access import Access
    from relay.http.app import Application
    from relay.http.body_budget import BodyBudget
    from relay.http.cors import Cors
    from relay.http.generate import ChatEndpoint, CompletionEndpoint, Served
    from relay.http.holdings import Holdings
    from relay.http.limits import Meter
    from relay.http.records import Records
    from relay.http.resume import ResumeRoute
    from relay.http.routes import ServerRoutes
    from relay.http.server import HttpServer
    from relay.http.turns import Turns
    from relay.ledger.metrics import GatewayMetrics, families
    from relay.model.text_files import read_text_files

    config = task.config
    tokenizer, template = read_text_files(Path(task.model_path))
    served = Served(name=config.model.name, max_context=task.max_context, created=task.created)
    metrics, records = GatewayMetrics(), Records(config.gateway.keep_ledgers)
    bodies = BodyBudget(int(config.gateway.max_bodies_mib * (1 << 20)), config.auth.key_share)
    actor = GatewayActor(
        max_attempts=config.gateway.max_attempts, on_event=metrics.on_event, poison_memory_s=config.gateway.poison_memory_s
    )
    key_metrics = KeyMetrics(metrics.registry)
    keys = None if config.auth.keys_file is None else KeyFile(Path(config.auth.keys_file))
    quota = None if task.quota is None else QuotaActor()
    if keys is not None:
        keys.start(must=host.start.epoch == 1)
    meter, turns = Meter(quota, key_metrics), Turns()
    routes = ServerRoutes(host.ask, records, served, allow_faults=config.runtime.allow_faults)
    shares = config.auth.share_prefix_cache
    held_bytes = config.gateway.max_held_mib * (1 << 20)
    holdings = Holdings(
        max_request=int(config.gateway.max_request_mib * (1 << 20)),
        max_key=int(config.auth.key_share * held_bytes),
        max_all=int(held_bytes),
        max_queue=int(config.router.max_queue_mib * (1 << 20)),
    )
    chat = ChatEndpoint(actor, tokenizer, template, served, config.gateway, meter, turns, holdings, share_prefix_cache=shares)
    completion = CompletionEndpoint(actor, tokenizer, template, served, config.gateway, meter, turns, holdings, share_prefix_cache=shares)
    resume = ResumeRoute(host.ask, {"/v1/chat/completions": chat, "/v1/completions": completion})
    app = Application(
        generation={
            "POST /v1/chat/completions": chat.answer,
            "POST /v1/completions": completion.answer,
            "GET /v1/requests/{id}/stream": resume.answer,
        },
        plain=routes.table(),
        access=Access(keys, config.auth.open_routes),
        cors=Cors(config.cors),
        metrics=metrics,
        key_metrics=key_metrics,
        records=records,
        bodies=bodies,
        turns=turns,
    )
    routes.is_draining = lambda: app.draining or server.draining
    server = HttpServer(
        app,
        fds["listen"],
        max_connections=config.gateway.max_connections,
        keep_alive_s=config.gateway.keep_alive_s,
        write_timeout_s=config.gateway.write_timeout_s,
        next_request_id=app.next_request_id,
        turns=turns,
    )

    async def on_ask(kind: str, body: bytes) -> bytes | None:
        if kind == "metrics":
            metrics.held_bytes.set(holdings.n_bytes)
            metrics.body_bytes.set(bodies.held)
            metrics.body_limit.set(bodies.limit)
            metrics.bodies_refused.set(bodies.refused)
            return msgspec.msgpack.encode(families(metrics.registry))
        if kind == "ledger":
            return await records.answer(body)
        return None

    async def reload_keys() -> None:
        """A look at the file now and then: no message could come that a restored backup or an edit by hand would not miss."""
        while keys is not None:
            await trio.sleep(config.auth.reload_s)
            keys.refresh()

    async def on_drain() -> None:
        """Running answers may finish, up to the limit; the rest end in an error event. New connections are for the other gateways or the
        next life of this one; where the whole server ends, their requests are refused."""
        with trio.move_on_after(config.runtime.drain_s * 0.9):
            if host.is_last_life:
                app.draining = server.draining = True
                await app.until_idle()
            else:
                server.stop_accepting()
                await server.until_unused()
        app.draining = True
        actor.end_all(Draining("the server went down before this was finished; try again", retry_after_s=5.0))
        await app.until_idle()
        with trio.move_on_after(_WRITTEN_WITHIN_S):
            await server.until_quiet()

    def telling(run: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
        """If it fails, the worker ends: then every stream ends in an event first."""

        async def told(*args: Context) -> None:
            try:
                await run(*args)
            except Exception:
                app.draining = server.draining = True
                actor.end_all(Unavailable("the gateway failed before this was finished; try again", retry_after_s=1.0))
                with trio.move_on_after(_WRITTEN_WITHIN_S):
                    await app.until_idle()
                    await server.until_quiet()
                raise

        return told

    def on_hurry() -> None:
        app.draining = server.draining = True
        actor.end_all(Draining("the server goes down at once, and this was not finished; try again", retry_after_s=5.0))

    actors: dict[str, Callable[[Context], Awaitable[None]]] = {task.actor: telling(actor.run)}
    if quota is not None and task.quota is not None:
        actors[task.quota] = telling(quota.run)
    gc.collect()
    gc.freeze()  # what was imported stays: full collections look at requests only, and so come often
    return Hosted(actors=actors, on_ask=on_ask, on_drain=on_drain, on_hurry=on_hurry, background=[server.run, telling(reload_keys)])


def _router(task: RouterTask) -> Hosted:
    from relay.actors.limiter import LimiterActor
    from relay.actors.router import RouterActor
    from relay.ledger.metrics import RouterMetrics, families

    config, metrics = task.config, RouterMetrics()
    actor = RouterActor(config.router, config.model.name, caching=config.engine.prefix_cache, room=task.room)

    async def on_ask(kind: str, body: bytes) -> bytes | None:
        if kind == "ready":
            return b"yes" if actor.ready() else b"no"
        if kind == "metrics":
            metrics.queued.set(actor.n_queued)
            metrics.queued_bytes.set(actor.n_queued_bytes)
            metrics.placed.set(actor.n_placed)
            return msgspec.msgpack.encode(families(metrics.registry))
        return None

    actors: dict[str, Callable[[Context], Awaitable[None]]] = {task.actor: actor.run}
    if task.limiter is not None:
        actors[task.limiter] = LimiterActor(tuple(f"quota/{i}" for i in range(config.gateway.workers))).run
    return Hosted(actors=actors, on_ask=on_ask)


def _engine(task: EngineTask, fds: dict[str, int], host: Host, faults: "Faults | None") -> Hosted:
    laps = Laps()
    if task.affinity:
        os.sched_setaffinity(0, task.affinity)
    from relay.actors.decode import DecodeActor
    from relay.actors.prefill import PrefillActor
    from relay.engine.board import StepBoard
    from relay.engine.measured import Measured
    from relay.engine.metrics import EngineMetrics
    from relay.engine.start import start_engine
    from relay.kv.book import BlockBook
    from relay.kv.pools import Pools
    from relay.ledger.metrics import families

    laps.end("imports")
    sys.setswitchinterval(0.0001)  # the loop and the compute thread share a GIL: 5 ms would be longer than a decode step
    worker, epoch = host.start.worker, host.start.epoch
    measured = Measured(Path(host.start.run_dir) / f"measured-{worker}.json")
    book, metrics = BlockBook(task.layout.n_blocks, caching=task.config.engine.prefix_cache), EngineMetrics()
    board = StepBoard(fds["board"])
    with _lack_explained(task):
        loaded = _on_device(task, epoch, measured, laps) if task.runner == "cuda" else _on_cpu(task, fds, host, measured, laps)
        compute, memory = loaded.compute, loaded.compute.runner.memory
        if faults is not None:
            from relay.faults import FaultyDevice, FaultyRunner

            faults.board = board
            faults.device = loaded.device if isinstance(loaded.device, FaultyDevice) else None
            compute = replace(compute, runner=FaultyRunner(compute.runner, faults, task.config.runtime.poison_token))
        engine = start_engine(compute, task.config.engine, book, board, measured)
        laps.end("warm_up")
    engine.subscribe(metrics.on_report)

    pools = Pools(memory, tuple(Address(name, epoch) for name in task.actors.values()), loaded.map_pool)
    model, grace_s = task.config.model.name, task.config.gateway.resume_grace_s
    log_bytes = int(task.config.gateway.max_logs_mib * (1 << 20))
    prefill = decode = None
    prefills = "prefill" in task.actors and "prefill" not in task.reserve
    actors: dict[str, Callable[[Context], Awaitable[None]]] = {}
    for role, name in task.actors.items():
        if role == "prefill":
            prefill = PrefillActor(engine, book, memory, pools, worker, model, reserve=role in task.reserve)
            actors[name] = prefill.run
        else:
            decode = DecodeActor(
                engine,
                book,
                memory,
                worker,
                model,
                reserve=role in task.reserve,
                prefills=prefills,
                grace_s=grace_s,
                max_log_bytes=log_bytes,
            )
            actors[name] = decode.run

    async def on_ask(kind: str, body: bytes) -> bytes | None:
        if kind == "resumable":
            return msgspec.msgpack.encode(decode.find_resumable(*_WANTED.decode(body))) if decode is not None else None
        counts = book.counts()
        if kind == "kv":
            return msgspec.json.encode({**msgspec.structs.asdict(counts), "problem": counts.audit()})
        if kind == "metrics":
            metrics.running.set(engine.n_running)
            metrics.waiting.set(engine.n_waiting)
            metrics.blocks_now(counts)
            metrics.log_bytes.set(decode.n_log_bytes if decode is not None else 0)
            return msgspec.msgpack.encode(families(metrics.registry))
        return None

    async def on_drain() -> None:
        """What decodes here goes on elsewhere, what is being prefilled is finished."""
        async with trio.open_nursery() as nursery:
            if decode is not None:
                runtime = task.config.runtime
                nursery.start_soon(decode.drain, min(runtime.readers_back_s, runtime.drain_s * _READERS_SHARE))
            if prefill is not None:
                nursery.start_soon(prefill.drain)

    structlog.get_logger().info(
        "engine loaded", epoch=epoch, actors=list(actors), blocks=task.layout.n_blocks, threads=task.threads, took_ms=laps.ms
    )
    return Hosted(actors=actors, on_ask=on_ask, progress=engine.progress, on_drain=on_drain, background=[engine.run, *loaded.background])


async def _populate_slowly(memory: "KVMemory") -> None:
    """After a restart others recover, and need the cores: a little at a time."""
    for start in range(0, memory.layout.pool_bytes, _POPULATE_BYTES):
        memory.populate(start, _POPULATE_BYTES)
        await trio.sleep(_POPULATE_EVERY_S)


@dataclass(frozen=True)
class _Loaded:
    """A runner on its pool, how pools of others are reached from there, and what is left to do beside. `device`: that it runs on."""

    compute: "Compute"
    map_pool: "Map"
    background: tuple[Callable[[], Awaitable[None]], ...] = ()
    device: object = None


def _lack_explained(task: EngineTask) -> AbstractContextManager[None]:
    if task.runner != "cuda":
        return nullcontext()
    from relay.engine.cuda.memory_plan import lack_explained

    return lack_explained()


def _on_device(task: EngineTask, epoch: int, measured: "Measured", laps: "Laps") -> _Loaded:
    from relay.kernels.cuda_devices import ORDER

    os.environ[ORDER[0]] = ORDER[1]  # before CUDA starts
    from relay.engine.cuda.compute import cuda_compute, device_pools, open_device
    from relay.engine.cuda.pool import DevicePool
    from relay.model.load import read_spec
    from relay.plan import step_limits

    path = Path(task.model_path)
    runtime = open_device(path, task.layout.dtype, task.gpu, peer_access=task.config.engine.peer_access)
    pool = DevicePool.create(task.layout, runtime, epoch)
    laps.end("pool")
    limits = step_limits(task.config, read_spec(path), task.layout)
    engine = task.config.engine
    torch_attention = engine.prefill_attention == "torch"
    compute = cuda_compute(path, pool, runtime, limits, measured, exact=engine.exact, torch_attention=torch_attention)
    laps.end("weights")
    return _Loaded(compute, device_pools(task.layout, runtime), device=runtime)


def _on_cpu(task: EngineTask, fds: dict[str, int], host: Host, measured: "Measured", laps: "Laps") -> _Loaded:
    from relay.kv.memory import KVMemory
    from relay.kv.pools import shared_memory

    memory = KVMemory(task.layout, fds["kv"])
    background: tuple[Callable[[], Awaitable[None]], ...] = ()
    if host.start.epoch == 1:
        memory.populate()
    else:
        background = (partial(_populate_slowly, memory),)
    laps.end("pool")

    def fd_of(address: Address) -> int | None:
        return host.peer_fds(address).get("kv")

    compute = _compute(task, fds, memory, measured)
    laps.end("weights")
    return _Loaded(compute, shared_memory(task.layout, fd_of), background)


def _compute(task: EngineTask, fds: dict[str, int], memory: "KVMemory", measured: "Measured") -> "Compute":
    if task.runner == "native":
        from relay.engine.native_compute import native_compute

        compute = native_compute(
            memory, fds["weights"], threads=task.threads, activations=task.config.engine.activations, measured=measured
        )
        os.close(fds["weights"])
        return compute
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # read when torch loads its OpenMP: two workers share cores, and a spinner starves the other
    from relay.engine.reference_compute import reference_compute

    return reference_compute(Path(task.model_path), memory, task.threads)


def preload() -> None:
    """Import what any worker may need but torch, which only the reference runner does."""
    import relay.actors.decode
    import relay.actors.gateway
    import relay.actors.limiter
    import relay.actors.prefill
    import relay.actors.quota
    import relay.actors.router
    import relay.engine.metrics
    import relay.engine.native_compute
    import relay.faults
    import relay.http.app
    import relay.http.resume
    import relay.http.routes
    import relay.http.server
    import relay.kv.pools
    import relay.ledger.metrics
    import relay.model.text_files  # noqa: F401


if __name__ == "__main__":
    run_host(int(sys.argv[1]), int(sys.argv[2]), assemble, preload)
