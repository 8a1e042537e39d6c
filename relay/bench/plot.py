"""Pictures of a run: how latencies are distributed, and how the run went over time. Needs matplotlib, which the extra `[bench]` brings."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from relay.bench.record import Record
from relay.bench.report import Report
from relay.errors import StartError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BUCKETS = 120


def require_matplotlib() -> None:
    """Before a run, not after it. Raises StartError."""
    if find_spec("matplotlib") is None:
        raise StartError("--plot needs matplotlib: pip install 'relayserve-pd[bench]'")


def plot(report: Report, records: Sequence[Record], path: Path) -> None:
    """Cumulative distributions of TTFT, TPOT, ITL and E2E; below them tokens/s, requests in flight and TTFT over the run."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    ok = [record for record in records if record.ok]
    figure = Figure(figsize=(12, 8), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(3, 4)
    columns: dict[str, list[float | None]] = {
        "TTFT": [record.ttft_s for record in ok],
        "TPOT": [record.tpot_s for record in ok],
        "ITL (by chunk)": [gap for record in ok for gap in record.itl_s()],
        "E2E": [record.e2e_s for record in ok],
    }
    for column, (name, values) in enumerate(columns.items()):
        _distribution(figure.add_subplot(grid[0, column]), name, [value * 1e3 for value in values if value is not None])
    _timeline(figure.add_subplot(grid[1, :]), records)
    _first_tokens(figure.add_subplot(grid[2, :]), records)
    context = report.context
    figure.suptitle(f"{context.model}: " + ", ".join(f"{key} {value}" for key, value in context.mode.items()))
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise StartError(f"the plot cannot be written to {path}: {error}") from error


def _distribution(axes: "Axes", name: str, values: list[float]) -> None:
    ordered = np.sort(values)
    axes.step(ordered, np.arange(1, len(ordered) + 1) / max(1, len(ordered)), where="post")
    axes.set(title=name, xlabel="ms", ylim=(0, 1.02))
    axes.grid(alpha=0.3)


def _timeline(axes: "Axes", records: Sequence[Record]) -> None:
    end_s = max((record.end_s for record in records), default=1.0)
    edges = np.linspace(0, max(end_s, 1e-3), _BUCKETS + 1)
    width = edges[1] - edges[0]
    chunks = np.array([at for record in records for at in record.chunk_s])
    tokens = np.array([record.tokens / len(record.chunk_s) for record in records for _ in record.chunk_s])
    rate = np.histogram(chunks, edges, weights=tokens)[0] / width
    middle = edges[:-1] + width / 2
    starts, ends = np.sort([record.start_s for record in records]), np.sort([record.end_s for record in records])
    in_flight = np.searchsorted(starts, middle, side="right") - np.searchsorted(ends, middle, side="right")
    axes.plot(middle, rate, label="output tokens/s")
    axes.set(xlabel="s", ylabel="tokens/s", xlim=(0, end_s))
    beside = axes.twinx()
    beside.plot(middle, in_flight, color="tab:gray", alpha=0.6, label="in flight")
    beside.set_ylabel("requests in flight")
    axes.figure.legend(loc="outside right center", fontsize="small")
    axes.grid(alpha=0.3)


def _first_tokens(axes: "Axes", records: Sequence[Record]) -> None:
    ok = [(record.start_s, record.ttft_s * 1e3) for record in records if record.ok and record.ttft_s is not None]
    axes.scatter([at for at, _ in ok], [ms for _, ms in ok], s=8, label="TTFT")
    failed = [record.start_s for record in records if not record.ok]
    axes.scatter(failed, [0.0] * len(failed), s=20, marker="x", color="tab:red", label="failed")
    axes.set(xlabel="start, s", ylabel="TTFT, ms")
    axes.grid(alpha=0.3)
