"""`relay bench URL`: put load on any OpenAI-compatible server and say what it answered with: latencies, rates, failures, goodput."""

import secrets
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import click
import trio
from rich.console import Console

from relay.bench.lengths import Lengths, parse_lengths
from relay.bench.plot import plot, require_matplotlib
from relay.bench.record import Record
from relay.bench.run import Outcome, run
from relay.bench.settings import Closed, Open, Replay, Settings
from relay.bench.slo import parse_slo
from relay.bench.table import show
from relay.bench.trace import read_trace
from relay.errors import StartError

INTERRUPTED = 130
_PROMPT = Lengths(low=128, high=128)
_OUTPUT = Lengths(low=64, high=64)


def _parsed(parse: Callable[[str], Any]) -> Callable[[click.Context, click.Parameter, str | None], Any]:
    """For an option whose text a function of ours understands or raises ValueError for."""

    def callback(ctx: click.Context, param: click.Parameter, value: str | None) -> Any:
        try:
            return None if value is None else parse(value)
        except (ValueError, ZeroDivisionError) as error:
            raise click.BadParameter(str(error), ctx, param) from None

    return callback


def _ids(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    if not (low.isdigit() and high.isdigit() and int(low) < int(high)):
        raise ValueError(f"`{text}` is no range of token ids; expected LOW:HIGH such as 1000:30000")
    return int(low), int(high)


def _scale(text: str) -> Fraction:
    scale = Fraction(text)
    if scale <= 0:
        raise ValueError(f"`{text}` is no scale; expected something above 0 such as 1/32")
    return scale


_COUNT = click.IntRange(min=1)
_SECONDS = click.FloatRange(min=0, min_open=True)
_FILE = click.Path(path_type=Path, dir_okay=False, writable=True)


def _fresh_seed() -> int:
    """With the same one a second run would find the prompts of the first in the server's cache."""
    return secrets.randbelow(1 << 31)


@click.command()
@click.argument("url")
@click.option("--model", help="Default: the first one that the server lists.")
@click.option("--endpoint", type=click.Choice(["completions", "chat"]), default="completions", show_default=True)
@click.option("--key", help="API key, if the server asks for one.")
@click.option("--concurrency", type=_COUNT, help="Closed loop (the default): so many streams.  [default: 1]")
@click.option("--requests", type=_COUNT, help="Closed loop: so many in all; default 8 for each stream. Trace: its first ones.")
@click.option("--rate", type=_SECONDS, help="Open loop: requests per second, whatever the server does.")
@click.option("--burstiness", type=_SECONDS, help="Open loop: 1 is Poisson, less is burstier.  [default: 1]")
@click.option("--duration", type=_SECONDS, help="Open loop or trace: seconds during which requests are sent.")
@click.option("--trace", type=click.Path(path_type=Path, dir_okay=False), help="Replay: a Mooncake .jsonl or an Azure .csv file.")
@click.option("--length-scale", callback=_parsed(_scale), help="Trace: times all lengths, such as 1/32.  [default: 1]")
@click.option("--time-scale", type=_SECONDS, help="Trace: times all gaps; 0.5 is twice as fast.  [default: 1]")
@click.option("--prompt-tokens", callback=_parsed(parse_lengths), help="N, A:B or lognormal:N:SIGMA.  [default: 128]")
@click.option("--output-tokens", callback=_parsed(parse_lengths), help="The same forms.  [default: 64]")
@click.option("--shared-prefix", type=click.IntRange(min=0), help="Prompt tokens that all requests begin with.  [default: 0]")
@click.option("--sampling", type=click.Choice(["greedy", "default"]), default="greedy", show_default=True, help="default: the server's.")
@click.option(
    "--seed", type=int, default=_fresh_seed, help="Of arrivals, lengths and contents; default: another each time, which is shown."
)
@click.option("--token-ids", callback=_parsed(_ids), default="1000:30000", show_default=True, help="Prompts are made of these.")
@click.option("--max-context", type=click.IntRange(min=2), help="Clip to so many tokens; default: what the server lists, if it does.")
@click.option("--warmup", type=click.IntRange(min=0), default=0, show_default=True, help="Requests before the measurement.")
@click.option("--timeout", type=_SECONDS, default=600.0, show_default=True, help="Seconds for one request.")
@click.option("--slo", callback=_parsed(parse_slo), help="Goodput within ttft=500ms,tpot=50ms,e2e=10s.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout and nothing else; keys: relay/bench/report.py.")
@click.option("--plot", "plot_path", type=_FILE, help="A picture (.png, .svg, .pdf); needs the extra [bench].")
@click.option("--save-requests", type=_FILE, help="A JSON line for each request.")
@click.option("--allow-failures", is_flag=True, help="Exit with 0 although requests failed.")
def bench(as_json: bool, plot_path: Path | None, save_requests: Path | None, allow_failures: bool, **options: Any) -> None:
    """Measure the server at URL. Definitions of what is measured: relay/bench/__init__.py."""
    if plot_path is not None:
        require_matplotlib()
    settings = _settings(**options)
    outcome = _run(settings)
    if outcome is None:
        click.echo("relay: stopped before anything was measured", err=True)
        raise SystemExit(INTERRUPTED)
    report = outcome.report
    if as_json:
        click.echo(report.to_json())
    else:
        show(report, Console(highlight=False))
    if save_requests is not None:
        _save(outcome.records, save_requests)
    if plot_path is not None:
        plot(report, outcome.records, plot_path)
    if report.measured.interrupted:
        raise SystemExit(INTERRUPTED)
    if report.measured.requests.failed and not allow_failures:
        raise SystemExit(1)


def _settings(
    *,
    concurrency: int | None,
    requests: int | None,
    rate: float | None,
    burstiness: float | None,
    duration: float | None,
    trace: Path | None,
    length_scale: Fraction | None,
    time_scale: float | None,
    prompt_tokens: Lengths | None,
    output_tokens: Lengths | None,
    shared_prefix: int | None,
    timeout: float,
    **options: Any,
) -> Settings:
    """One mode, and no option of another one."""
    mode: Closed | Open | Replay
    rows = []
    if trace is not None:
        _refuse("--trace", concurrency=concurrency, rate=rate, burstiness=burstiness)
        _refuse("--trace", prompt_tokens=prompt_tokens, output_tokens=output_tokens, shared_prefix=shared_prefix)
        rows = read_trace(trace)[:requests]
        mode = Replay(trace.name, str(length_scale or 1), time_scale or 1.0, duration)
    elif rate is not None:
        _refuse("--rate", concurrency=concurrency, requests=requests, length_scale=length_scale, time_scale=time_scale)
        if duration is None:
            raise click.UsageError("--rate needs --duration: how many seconds to send for")
        mode = Open(rate, burstiness or 1.0, duration)
    else:
        _refuse("a closed loop", burstiness=burstiness, duration=duration, length_scale=length_scale, time_scale=time_scale)
        streams = concurrency or 1
        mode = Closed(streams, requests or 8 * streams)
    return Settings(
        mode=mode,
        rows=rows,
        length_scale=float(length_scale or 1),
        prompt_tokens=prompt_tokens or _PROMPT,
        output_tokens=output_tokens or _OUTPUT,
        shared_prefix=shared_prefix or 0,
        timeout_s=timeout,
        **options,
    )


def _refuse(mode: str, **options: object) -> None:
    for name, value in options.items():
        if value is not None:
            raise click.UsageError(f"--{name.replace('_', '-')} does not go with {mode}")


def _run(settings: Settings) -> Outcome | None:
    outcome = None
    try:
        outcome = trio.run(run, settings, Console(stderr=True))
    except* StartError as group:
        first: BaseException = group
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise StartError(str(first)) from None
    except* KeyboardInterrupt:
        pass
    return outcome


def _save(records: list[Record], path: Path) -> None:
    try:
        with path.open("wb") as file:
            file.writelines(record.to_json() + b"\n" for record in records)
    except OSError as error:
        raise StartError(f"the requests cannot be written to {path}: {error}") from error
