"""`relay chaos CONFIG`: kill parts of a real server under real load, and show that nothing is lost."""

import signal
import sys
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from relay.chaos.plan import PLANS, parse_plans
from relay.chaos.requests import specs
from relay.chaos.run import Row, reference, run_row
from relay.chaos.server import ServerUnderTest

_TABLE_WIDTH = 190


@click.command()
@click.argument("config", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--plan", default=",".join(PLANS), show_default=True, help="What to do, by name, joined by commas; `none` is load alone.")
@click.option("--requests", "n_requests", default=200, show_default=True, help="For each plan.")
@click.option("--concurrency", default=16, show_default=True)
@click.option("--tokens", default=40, show_default=True, help="Of each answer, at most.")
@click.option("--every", default="0.5:2.0", show_default=True, metavar="MIN:MAX", help="Seconds from one recovery to the next strike.")
@click.option("--seed", default=1, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def chaos(config: Path, plan: str, n_requests: int, concurrency: int, tokens: int, every: str, seed: int, as_json: bool) -> None:
    """Serve CONFIG, load it, and strike it. Exit status 1 if anything was lost, repeated, changed or leaked."""
    names = parse_plans(plan)
    least, colon, most = every.partition(":")
    try:
        every_s = float(least), float(most if colon else least)
    except ValueError:
        raise click.BadParameter(f"`{every}`; expected seconds like 0.5:2.0", param_hint="--every") from None
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the server that we started ends with us
    console = Console(stderr=True)
    asked = specs(tokens)
    rows: list[Row] = []
    with ServerUnderTest(config) as server, Progress(console=console, disable=not console.is_terminal) as bars:
        right = reference(server, asked)
        for name in names:
            bar = bars.add_task(name, total=n_requests)
            rows.append(
                run_row(
                    server,
                    name,
                    asked,
                    right,
                    n_requests=n_requests,
                    concurrency=concurrency,
                    every_s=every_s,
                    seed=seed,
                    on_progress=lambda n, bar=bar: bars.update(bar, completed=n),  # type: ignore[misc]
                )
            )
    if as_json:
        click.echo(msgspec.json.encode({"config": str(config), "rows": rows}).decode())
    else:
        plain = Console()
        plain.width = max(plain.width, _TABLE_WIDTH)  # a table folded to 80 columns is no table
        plain.print(_table(rows))
        for row in rows:
            if row.restart_ms:
                plain.print(
                    f"{row.plan}: an engine worker's restart, ms: {', '.join(f'{part} {ms:.0f}' for part, ms in row.restart_ms.items())}"
                )
    if any(row.failed or row.identical != row.requests or row.blocks_leaked or row.processes_leaked for row in rows):
        sys.exit(1)


def _table(rows: list[Row]) -> Table:
    table = Table(show_edge=False)
    columns = (
        "requests",
        "strikes",
        "retried",
        "failed",
        "tokens_lost",
        "tokens_repeated",
        "identical",
        "blocks_leaked",
        "processes_leaked",
    )
    times = ("recovery_ms_p50", "recovery_ms_p99", "client_gap_ms_max")
    table.add_column("plan")
    for column in columns + times:
        table.add_column(column.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(row.plan, *(str(getattr(row, column)) for column in columns), *(f"{getattr(row, column):.0f}" for column in times))
        for failure, n in row.failures.items():
            table.add_row(f"  {n} x {failure}")
    return table
