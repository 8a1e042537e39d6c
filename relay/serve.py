"""The root process: from a config to a running server, and to an end that leaves nothing behind.

It fetches the model, plans, binds the listening socket, holds every pool's memfd, and supervises. Workers never outlive it.
"""

import os
import resource
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import trio

from relay.config import Config, split_bind
from relay.engine.board import BOARD_BYTES, read_board
from relay.errors import ConfigError, KernelsUnavailable, StartError
from relay.kernels.cuda_devices import Gpu, find_gpus, refuse_expandable_segments
from relay.kv.memory import create
from relay.memory_limit import memory_limit
from relay.model.source import Progress, resolve
from relay.model.text_files import read_text_files
from relay.plan import EngineTask, Plan, PlannedWorker, make_plan
from relay.runtime.run_directory import run_directory
from relay.runtime.supervisor import OnEvent, Supervisor, WorkerSpec
from relay.weights import SharedWeights, estimate, pack

_PROCESS_BYTES = 45 << 20  # of one that has imported everything
_OTHER_FILES = 512  # of a process, beside its connections
WORKER_COMMAND = (sys.executable, "-m", "relay.worker")


def listen(bind: str) -> socket.socket:
    """The one listening socket; gateway workers inherit it, so that the death of one refuses nobody. Raises StartError."""
    host, port = split_bind(bind)
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(1024)
    except OSError as error:
        raise StartError(f"cannot listen on {bind}: {error.strerror or error}; choose another with --bind HOST:PORT") from error
    return sock


@dataclass
class EngineMemory:
    """What one engine worker shares: its KV pool and its step board, new ones for each epoch. The root's descriptors make a death a mere
    unmapping, and leave the board readable. A pool on a device is the worker's own, and peers learn of it with each lease."""

    name: str
    pool_bytes: int
    weights_fd: int | None
    on_device: bool
    fds: dict[str, int] = field(default_factory=dict)

    def of_epoch(self, epoch: int) -> dict[str, int]:
        """Called when the last epoch's process has been reaped."""
        threading.Thread(target=_close_all, args=(tuple(self.fds.values()),)).start()  # giving back gigabytes takes its time
        self.fds = {}
        if not self.on_device:
            self.fds["kv"] = create(f"relay-kv-{self.name}-{epoch}", self.pool_bytes)
        self.fds["board"] = create(f"relay-board-{self.name}-{epoch}", BOARD_BYTES)
        return self.fds if self.weights_fd is None else {**self.fds, "weights": self.weights_fd}

    def suspects(self) -> tuple[tuple[str, ...], bool]:
        """Whose step the last epoch died in."""
        return read_board(self.fds["board"]) if "board" in self.fds else ((), False)


def allow_connections(n: int) -> None:
    """Raise the limit of open files, which gateways inherit, as far as we may. Raises StartError if that is not enough."""
    wanted = n + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and wanted > hard:
        raise StartError(f"gateway.max_connections is {n}, which needs {wanted} open files, and this user may have {hard} (ulimit -Hn)")
    if soft != resource.RLIM_INFINITY and wanted > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _close_all(fds: tuple[int, ...]) -> None:
    for fd in fds:
        os.close(fd)


def worker_spec(worker: PlannedWorker, listen_fd: int, weights_fd: int | None) -> WorkerSpec:
    payload = msgspec.msgpack.encode(worker.task)
    if worker.pool is not None:
        on_device = worker.memory is not None
        memory = EngineMemory(worker.name, worker.pool.pool_bytes, weights_fd, on_device)
        share = () if on_device else ("kv",)
        assert isinstance(worker.task, EngineTask)
        reserve = worker.task.reserve
        return WorkerSpec(
            worker.name,
            payload,
            memory.of_epoch,
            share=share,
            drain_rank=worker.drain_rank,
            suspects=memory.suspects,
            roles=tuple(role for role in worker.task.actors if role not in reserve),
            reserve=reserve,
        )
    if worker.name.startswith("gateway-"):
        return WorkerSpec(worker.name, payload, lambda epoch: {"listen": listen_fd}, drain_rank=worker.drain_rank, roles=("gateway",))
    return WorkerSpec(worker.name, payload, drain_rank=worker.drain_rank, roles=("router",))


@dataclass(frozen=True)
class Announcements:
    """Who is told what happens: the command line prints it. on_plan comes before anything starts, on_ready when requests are served."""

    on_event: OnEvent
    on_plan: Callable[[Plan, str], None]
    on_ready: Callable[[str], None]


@dataclass(frozen=True)
class Prepared:
    """What a server is started from: its plan, and the packed weights where the native runner computes."""

    plan: Plan
    weights: SharedWeights


def prepare(config: Config, progress: Progress, say: Callable[[str], None] = lambda what: None, *, only_plan: bool = False) -> Prepared:
    """Fetch the model and pack its weights (unless `only_plan`), which compiles the kernels the first time; `say` is told of what may take
    a while. Raises StartError."""
    gpus_here: tuple[Gpu, ...] = ()
    if config.device != "cpu":
        refuse_expandable_segments(os.environ)  # which the workers inherit
    if config.device == "cuda" and not only_plan:
        gpus_here = _require_gpus(config)
    elif config.device == "cuda":
        with suppress(KernelsUnavailable):  # explained all the same
            gpus_here = find_gpus()
    path = resolve(config.model.source, sha256=config.model.sha256, progress=progress)
    if only_plan:
        read_text_files(path)  # a tokenizer or a chat template that no gateway could read is refused here too
    weights = estimate(config, path) if only_plan else pack(config, path, say)
    plan = make_plan(config, path, int(time.time()), weights.n_bytes, weights.note, gpus_here)
    if config.device == "cpu":
        _require_memory(plan)
    return Prepared(plan, weights)


def _require_memory(plan: Plan) -> None:
    """Raises ConfigError where there is less than the plan takes: pools would fill up, and then a worker would be killed."""
    here, whose = memory_limit()
    beside = _PROCESS_BYTES * (len(plan.workers) + plan.config.runtime.spares + 1)
    if plan.total_bytes + beside > here:
        raise ConfigError(
            f"pools and weights take {plan.total_bytes >> 20} MiB, processes some {beside >> 20}, and {whose} {here >> 20} MiB of memory: "
            "lower engine.kv_memory_mib, or a worker's own kv_memory_mib"
        )


def _require_gpus(config: Config) -> tuple[Gpu, ...]:
    """Before anything is fetched. Raises KernelsUnavailable."""
    instead = "device: cpu serves without"
    try:
        found = find_gpus()
    except KernelsUnavailable as error:
        raise KernelsUnavailable(f"the config computes on GPUs: {error}; {instead}") from error
    highest = max(config.gpus())
    if highest >= len(found):
        raise KernelsUnavailable(
            f"the config computes on GPU {highest}, and there are {len(found)}, from 0 on; name others in `gpus`, or {instead}"
        )
    return found


async def serve(prepared: Prepared, announce: Announcements, run_parent: Path | None = None) -> None:
    """Serve until SIGINT or SIGTERM has drained everything. Raises StartError."""
    plan = prepared.plan
    allow_connections(plan.config.gateway.max_connections)
    with listen(plan.config.gateway.bind) as sock, run_directory(run_parent or Path(tempfile.gettempdir())) as run_dir:
        url = _url(sock, plan.config.gateway.bind)
        announce.on_plan(plan, url)
        specs = [worker_spec(worker, sock.fileno(), prepared.weights.fd) for worker in plan.workers]
        supervisor: Supervisor

        async def on_ask(kind: str, body: bytes) -> bytes | None:
            match kind:
                case "admin.processes":
                    return msgspec.json.encode({"workers": supervisor.table(), "spares": supervisor.spares()})
                case "ready":
                    return msgspec.json.encode(supervisor.resting())
                case "admin.drain":
                    return b"yes" if supervisor.recycle(body.decode()) else b"no"
            return None

        supervisor = Supervisor(run_dir, specs, plan.config.runtime, WORKER_COMMAND, announce.on_event, on_ask)
        async with trio.open_nursery() as nursery:
            await nursery.start(supervisor.drain_on_signal)  # before there is anything that a signal would have to end
            nursery.start_soon(_say_when_ready, supervisor, url, announce)
            await supervisor.run()
            nursery.cancel_scope.cancel()


async def _say_when_ready(supervisor: Supervisor, url: str, announce: Announcements) -> None:
    while b"yes" not in (await supervisor.ask("ready", b"", 1.0)).answers.values():
        await trio.sleep(0.05)
    announce.on_ready(url)


def _url(sock: socket.socket, bind: str) -> str:
    host, port = split_bind(bind)[0], sock.getsockname()[1]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
