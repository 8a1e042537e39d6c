"""`relay check CONFIG`: validate a config and explain what it would start, without starting anything."""

import sys
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.table import Table

from relay import config as configuration
from relay.cli.progress import model_progress
from relay.engine.cuda.decode_graphs import DecodeGraphs
from relay.engine.cuda.memory_plan import DeviceMemory
from relay.errors import KernelsUnavailable
from relay.kernels.cuda_devices import Gpu, find_gpus
from relay.plan import EngineTask, Plan, PlannedWorker
from relay.serve import prepare

_MIB = 1 << 20
_PIPED_COLUMNS = 120


@click.command()
@click.argument("config", type=click.Path(path_type=Path), required=False)
@click.option("--schema", is_flag=True, help="Print the JSON schema of config files, every field with its meaning, and stop.")
def check(config: Path | None, schema: bool) -> None:
    """Validate CONFIG (a YAML file) and explain what it would start and the memory it takes. Needs no GPU. Fetches the model."""
    if schema:
        click.echo(msgspec.json.format(msgspec.json.encode(configuration.schema()), indent=2))
        return
    if config is None:
        raise click.UsageError("name a config file, or ask for --schema")
    settings = configuration.load(config)
    console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else _PIPED_COLUMNS)
    with model_progress(console) as progress:
        plan = prepare(settings, progress, only_plan=True).plan
    explain(plan, console)


def explain(plan: Plan, console: Console) -> None:
    """Print a plan."""
    spec, config = plan.spec, plan.config
    console.print(
        f"model       {config.model.name}: {spec.architecture}, {spec.n_layers} layers, hidden {spec.hidden}, vocabulary {spec.vocab_size}"
    )
    console.print(f"computes    by the {plan.runner} runner{f' ({plan.why})' if plan.why else ''}")
    console.print(f"contexts    up to {plan.max_context} tokens, prompt and answer together (the model was trained for {spec.max_context})")
    console.print(f"listens on  {config.gateway.bind}")
    console.print(f"placement   {config.router.placement}; at most {config.router.max_queue} requests wait")
    table = Table(show_edge=False, pad_edge=False)
    for column in ("process", "actors", "on", "weights MiB", "KV MiB", "KV tokens", "batch"):
        table.add_column(column, justify="left" if column in ("process", "actors", "on") else "right", no_wrap=column != "actors")
    for worker in plan.workers:
        row = [worker.name, _actors(worker)]
        if isinstance(worker.task, EngineTask):
            layout = worker.task.layout
            row += [
                _device(worker.task),
                "shared" if plan.shares_weights else f"{plan.weight_bytes / _MIB:.0f}",
                f"{layout.pool_bytes / _MIB:.0f}",
                str(layout.n_blocks * layout.block_tokens),
                str(config.engine.max_running),
            ]
        table.add_row(*row)
    console.print(table)
    if any(isinstance(worker.task, EngineTask) and worker.task.reserve for worker in plan.workers):
        console.print("in brackets roles that a worker takes while nobody lives whose they are")
    if plan.shares_weights:
        console.print(f"weights     {plan.weight_bytes / _MIB:.0f} MiB, packed once and shared by all engine workers")
    for worker in plan.workers:
        if worker.memory is not None:
            console.print(f"{worker.name:<11} {_parts(worker.memory, _n_graphs(plan))}")
    for gpu, n_bytes in sorted(plan.gpu_bytes().items()):
        console.print(f"GPU {gpu:<7} {n_bytes / _MIB:.0f} MiB in all")
    if plan.routes():
        console.print(f"KV goes     {plan.routes()}", markup=False)
    if config.device == "cuda":
        console.print(f"GPUs here   {_gpus_here(plan.gpus_here)}", markup=False)
    console.print(f"memory      {plan.total_bytes / _MIB:.0f} MiB of weights and KV in all, beside what the processes take themselves")


def _actors(worker: PlannedWorker) -> str:
    """Those of a role that the worker takes in need only are in brackets."""
    reserve = {worker.task.actors[role] for role in worker.task.reserve} if isinstance(worker.task, EngineTask) else set[str]()
    return ", ".join(f"({actor})" if actor in reserve else actor for actor in worker.actors)


def _device(task: EngineTask) -> str:
    if task.gpu is not None:
        return f"GPU {task.gpu}"
    return "emulator" if task.runner == "cuda" else f"{task.threads} threads"


def _n_graphs(plan: Plan) -> int:
    return len(DecodeGraphs(plan.config.engine.max_running, plan.max_context).buckets())


def _parts(memory: DeviceMemory, n_graphs: int) -> str:
    """Of a worker on a device, in MiB."""
    parts = {
        "weights": memory.weights,
        "KV": memory.kv,
        "steps": memory.steps,
        "attention": memory.attention,
        "draws": memory.draws,
        "tables": memory.tables,
        f"CUDA itself and {n_graphs} graphs": memory.itself,
    }
    return f"{memory.total / _MIB:.0f} MiB: " + ", ".join(f"{name} {n_bytes / _MIB:.0f}" for name, n_bytes in parts.items())


def _gpus_here(gpus: tuple[Gpu, ...]) -> str:
    """With what is free on each, and which others it reaches."""
    if not gpus:
        try:
            gpus = find_gpus()
        except KernelsUnavailable as error:
            return f"none: {error}. kv_memory_mib: auto is taken for 1024"
    shown = []
    for number, gpu in enumerate(gpus):
        peers = f", reaches {', '.join(map(str, gpu.peers))}" if gpu.peers else ""
        shown.append(f"{number}: {gpu.name}, {gpu.free / _MIB:.0f} of {gpu.total / _MIB:.0f} MiB free{peers}")
    return "; ".join(shown)
