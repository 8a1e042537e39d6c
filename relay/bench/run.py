"""A whole run: settings in; probe, warm-up and load in this order; a report and its records out.

Order of ending: the load ends, or SIGINT or SIGTERM cancels it; then the meter is read; then the wire closes what is open.
"""

import resource
import signal
from datetime import UTC, datetime
from typing import Any

import msgspec
import trio
from rich.console import Console

from relay import __version__
from relay.bench.bar import show_progress
from relay.bench.client import Client
from relay.bench.dialect import Dialect
from relay.bench.load import Load
from relay.bench.meter import Meter
from relay.bench.probe import Probe
from relay.bench.prompt import PromptMaker
from relay.bench.record import Record
from relay.bench.report import Context, Report, measure
from relay.bench.schedule import Clipped, Planned, clip
from relay.bench.settings import Closed, Replay, Settings, warm_up
from relay.bench.statistic import distribution
from relay.bench.target import parse_target
from relay.bench.wire import Wire

_WARM_UP_STREAMS = 8


class Outcome(msgspec.Struct, frozen=True):
    report: Report
    records: list[Record]


async def run(settings: Settings, console: Console) -> Outcome | None:
    """None if it was stopped before the measurement began. Raises StartError (in a group) if the server cannot be measured at all."""
    target = parse_target(settings.url, settings.key)
    _raise_file_limit()
    wire = Wire(target)
    bench = _Bench(settings, console, Client(wire, target, timeout_s=settings.timeout_s))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(wire.run)
        stop = trio.CancelScope()
        nursery.start_soon(_cancel_on_signal, stop)
        with stop:
            await bench.run()
        outcome = bench.outcome(interrupted=stop.cancelled_caught)
        nursery.cancel_scope.cancel()
    return outcome


class _Bench:
    """What is known so far: `outcome` may be asked for at any time."""

    def __init__(self, settings: Settings, console: Console, client: Client) -> None:
        self._settings, self._console, self._client = settings, console, client
        self._clipped = Clipped()
        self._notes: list[str] = []
        self._context: Context | None = None
        self._load: Load | None = None
        self._meter: Meter | None = None

    async def run(self) -> None:
        settings, (low, high) = self._settings, self._settings.token_ids
        probe = Probe(self._client, endpoint=settings.endpoint, model=settings.model, seed=settings.seed, low=low, high=high)
        dialect = await probe.run()
        self._notes += probe.notes
        maker = PromptMaker(seed=settings.seed, low=low, high=high, calibration=dialect.calibration)

        def prepare(planned: Planned) -> bytes:
            return dialect.body(maker.make(planned.prompt), planned.output_tokens, sampling=settings.sampling)

        async def ask(body: bytes, planned: Planned, start: float, epoch: float) -> Record:
            return await self._client.ask(dialect.path, body, planned, start, epoch)

        max_context = settings.max_context or dialect.max_context
        plan = [planned if max_context is None else clip(planned, max_context, self._clipped) for planned in settings.plan()]
        if not plan:
            self._notes.append("the schedule has no request in its time")
        await self._warm_up(Load(prepare, ask), plan)
        self._context = self._describe(dialect)
        await self._measure(Load(prepare, ask), plan)

    def outcome(self, *, interrupted: bool) -> Outcome | None:
        """None before the measurement."""
        context, load, meter = self._context, self._load, self._meter
        if context is None or load is None or meter is None:
            return None
        tpot = distribution([record.tpot_s for record in load.records if record.tpot_s is not None])
        generator = meter.read(sum(record.tokens for record in load.records), tpot.p50 * 1e3 if tpot else 0.0)
        measured = measure(load.records, slo=self._settings.slo, generator=generator, interrupted=interrupted, unfinished=load.in_flight)
        return Outcome(Report(context, measured), load.records)

    async def _warm_up(self, load: Load, plan: list[Planned]) -> None:
        mode = self._settings.mode
        warm = warm_up(plan, self._settings.warmup)
        await load.closed(warm, mode.concurrency if isinstance(mode, Closed) else _WARM_UP_STREAMS)
        failed = [record for record in load.records if not record.ok]
        if failed:
            self._notes.append(f"{len(failed)} of {len(warm)} warm-up requests failed: {failed[0].failure}: {failed[0].message}")

    async def _measure(self, load: Load, plan: list[Planned]) -> None:
        self._load, self._meter = load, Meter()
        mode = self._settings.mode
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._meter.run)
            nursery.start_soon(show_progress, load, len(plan), self._console)
            if isinstance(mode, Closed):
                await load.closed(plan, mode.concurrency)
            else:
                await load.open(plan)
            nursery.cancel_scope.cancel()

    def _describe(self, dialect: Dialect) -> Context:
        settings = self._settings
        lengths: dict[str, Any] = {}
        if not isinstance(settings.mode, Replay):
            lengths["prompt_tokens"] = str(settings.prompt_tokens)
            lengths["output_tokens"] = str(settings.output_tokens)
            lengths["shared_prefix"] = settings.shared_prefix
        return Context(
            tool=f"relay bench {__version__}",
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            url=settings.url,
            model=dialect.model,
            endpoint=settings.endpoint,
            mode=msgspec.to_builtins(settings.mode),
            workload={
                **lengths,
                "prompts": "text" if dialect.calibration else "token_ids",
                "sampling": settings.sampling,
                "ignore_eos": dialect.ignore_eos,
                "warmup": settings.warmup,
                "seed": settings.seed,
            },
            clipped=self._clipped,
            notes=self._notes,
        )


async def _cancel_on_signal(scope: trio.CancelScope) -> None:
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for _ in signals:
            scope.cancel()


def _raise_file_limit() -> None:
    """A stream is an open file; most shells allow 1,024 of them unless asked for more."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
