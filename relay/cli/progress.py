"""Progress of fetching a model, as bars in a terminal and as lines elsewhere."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from relay.model.source import Progress as OnProgress
from relay.model.source import Stage


@contextmanager
def model_progress(console: Console) -> Iterator[OnProgress]:
    """A callback for `relay.model.source.resolve`; shows nothing if there is nothing to wait for."""
    with Progress(
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn(), console=console, transient=True
    ) as bars:
        tasks: dict[str, int] = {}

        def on_progress(stage: Stage, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(f"model: {stage}", total=total or None)
                if not console.is_terminal:
                    console.print(f"model: {stage}")
            bars.update(tasks[stage], completed=done, total=total or None)  # type: ignore[arg-type]

        yield on_progress
