"""Progress of a run in a terminal. Drawn twice a second by hand: rich's own thread would take the core from the loop that measures."""

import trio
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from relay.bench.load import Load

_EVERY_S = 0.5


async def show_progress(load: Load, total: int, console: Console) -> None:
    """Until cancelled; nothing where there is no terminal."""
    if not console.is_terminal:
        return
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as bar:
        task = bar.add_task("", total=total)
        while True:
            bar.update(task, completed=len(load.records), description=f"{load.in_flight} in flight, {load.failed} failed")
            bar.refresh()
            await trio.sleep(_EVERY_S)
