"""`relay serve CONFIG`: start everything, say what was started, process by process, and serve until told to stop."""

import shlex
import sys
from pathlib import Path
from typing import Any

import click
import msgspec
import trio
from rich.console import Console

from relay import config as configuration
from relay import log
from relay.cli.progress import model_progress
from relay.errors import StartError
from relay.line_writer import standard_output
from relay.plan import Plan
from relay.serve import Announcements, allow_connections, listen, prepare
from relay.serve import serve as run_server


@click.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.option("--bind", metavar="HOST:PORT", help="Listen here instead of where the config says.")
def serve(config: Path, bind: str | None) -> None:
    """Serve the model that CONFIG (a YAML file) names."""
    settings = configuration.load(config)
    if bind is not None:
        configuration.split_bind(bind)
        settings = msgspec.structs.replace(settings, gateway=msgspec.structs.replace(settings.gateway, bind=bind))
    output: Any = standard_output()
    console = Console(file=output, highlight=False, soft_wrap=True)
    log.configure("root", level="warning" if console.is_terminal else settings.log.level)
    listen(settings.gateway.bind).close()  # better now than after all the work
    allow_connections(settings.gateway.max_connections)
    with model_progress(console) as progress:
        prepared = prepare(settings, progress, lambda what: console.print(what, markup=False))
    printer = _Printer(console)
    try:
        trio.run(run_server, prepared, Announcements(printer.on_event, printer.on_plan, printer.on_ready))
    except* StartError as group:
        first: BaseException = group
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        console.print(f"relay: {first}", markup=False)
        sys.exit(1)


class _Printer:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._model = ""

    def on_plan(self, plan: Plan, url: str) -> None:
        self._model = plan.config.model.name
        pools = sum(worker.pool is not None for worker in plan.workers)
        self._console.print(
            f"RelayServe: {self._model} on {url}, {len(plan.workers)} processes, contexts up to {plan.max_context} tokens, "
            f"{plan.total_bytes / (1 << 20):.0f} MiB for {pools} engine worker(s)"
        )
        self._console.print(f"  computing by the {plan.runner} runner: {plan.why}", markup=False)
        if plan.routes():
            self._console.print(f"  KV goes {plan.routes()}", markup=False)
        for worker in plan.workers:
            pool = f", KV pool {worker.pool.pool_bytes / (1 << 20):.0f} MiB" if worker.pool else ""
            self._console.print(f"  {worker.name:<12} {', '.join(worker.actors)}{pool}", markup=False)

    def on_event(self, name: str, /, **fields: str | int | float) -> None:
        match name:
            case "worker_started":
                text = f"  {fields['worker']:<12} started, pid {fields['pid']}"
            case "spare_started":
                text = f"  spare        waits, pid {fields['pid']}"
            case "worker_ready":
                text = f"  {fields['worker']:<12} ready after {fields['in_s']:.1f} s"
            case "worker_died":
                text = f"  {fields['worker']:<12} ended: {fields['reason']}"
            case "worker_rests":
                text = f"  {fields['worker']:<12} rests for {fields['in_s']:g} s: {fields['reason']}"
            case "draining":
                text = f"draining {fields['workers']}"
            case "drained":
                text = "drained"
            case _:
                text = f"  {fields.get('worker', '')!s:<12} {name.replace('_', ' ')}"
        self._console.print(text, markup=False)

    def on_ready(self, url: str) -> None:
        body = f'{{"model": "{self._model}", "messages": [{{"role": "user", "content": "Why is the sky blue?"}}], "stream": true}}'
        command = f"curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' -d {shlex.quote(body)}"
        self._console.print(f"ready. Try:\n  {command}", markup=False)
