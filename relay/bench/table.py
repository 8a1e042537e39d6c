"""A report as people read it in a terminal."""

from rich.console import Console
from rich.table import Table

from relay.bench.report import Context, Goodput, Measured, Report
from relay.bench.statistic import Distribution

_NOTABLE_SHARE = 0.05
_COLUMNS = ("mean", "p50", "p90", "p99")


def show(report: Report, console: Console) -> None:
    """Print it."""
    context, measured = report.context, report.measured
    _show_context(context, console)
    _show_requests(measured, console)
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("ms")
    for name in _COLUMNS:
        table.add_column(name, justify="right")
    rows = {"TTFT": measured.ttft_ms, "TPOT": measured.tpot_ms, "ITL (by chunk)": measured.itl_ms, "E2E": measured.e2e_ms}
    for name, values in rows.items():
        table.add_row(name, *_cells(values))
    console.print(table)
    chunks = f"; {measured.chunks} chunks with text" if measured.chunks != measured.output_tokens else ""
    _line(
        console, "output", f"{measured.output_tokens_per_s:.1f} tokens/s ({measured.output_tokens} in {measured.duration_s:.2f} s{chunks})"
    )
    _line(console, "prompts", f"{measured.prompt_tokens_per_s:.1f} tokens/s ({measured.prompt_tokens}), {_cached(measured)}")
    if (measured.cached_share or 0) > _NOTABLE_SHARE:
        _line(console, "note", "prompts were found in the server's cache: TTFT is of what was left of them (was this seed used before?)")
    if measured.slo is not None:
        _line(console, "goodput", _goodput(measured.slo))
    _show_generator(measured, console)


def _show_context(context: Context, console: Console) -> None:
    _line(console, "server", f"{context.url}, {context.model}, {context.endpoint}")
    _line(console, "load", ", ".join(f"{key} {value}" for key, value in context.mode.items()))
    _line(console, "prompts", ", ".join(f"{key} {value}" for key, value in context.workload.items()))
    clipped = context.clipped
    if clipped.requests:
        text = (
            f"{clipped.requests} requests by {clipped.prompt_tokens} prompt and {clipped.output_tokens} output tokens, to fit the context"
        )
        _line(console, "clipped", text)
    for note in context.notes:
        _line(console, "note", note)


def _show_requests(measured: Measured, console: Console) -> None:
    requests = measured.requests
    parts = [f"{requests.ok} ok", f"{requests.failed} failed"]
    parts += [f"{requests.short} shorter than asked"] if requests.short else []
    parts += [f"{requests.without_text} without text"] if requests.without_text else []
    parts += [f"stopped by hand with {measured.unfinished} unfinished, not counted"] if measured.interrupted else []
    _line(console, "requests", ", ".join(parts))
    for kind, n in requests.failures.items():
        _line(console, "", f"{n} x {kind}: {measured.messages[kind]}")


def _show_generator(measured: Measured, console: Console) -> None:
    generator = measured.generator
    cost = f", {generator.cpu_us_per_token:.1f} us per token" if generator.cpu_us_per_token is not None else ""
    text = f"{generator.cpu_share:.1%} of a core{cost}, loop {generator.lag_p99_ms:.1f} ms late at p99"
    _line(console, "generator", text)
    if generator.saturated:
        console.print(f"The generator was saturated: {generator.reason}. These figures are not the server's alone.", style="bold red")


def _cells(values: Distribution | None) -> list[str]:
    return [f"{getattr(values, name):.2f}" if values is not None else "-" for name in _COLUMNS]


def _cached(measured: Measured) -> str:
    return "cached: not told by the server" if measured.cached_share is None else f"{measured.cached_share:.1%} of them cached"


def _goodput(slo: Goodput) -> str:
    limits = ", ".join(
        f"{name} {limit * 1e3:g} ms"
        for name, limit in (("TTFT", slo.limits.ttft_s), ("TPOT", slo.limits.tpot_s), ("E2E", slo.limits.e2e_s))
        if limit is not None
    )
    return (
        f"{slo.requests_share:.1%} of requests within {limits}: {slo.requests_per_s:.2f} requests/s, {slo.output_tokens_per_s:.1f} tokens/s"
    )


def _line(console: Console, name: str, text: str) -> None:
    console.print(f"{name:<10} {text}", markup=False, soft_wrap=True)
