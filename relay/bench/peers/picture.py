"""The result as a picture: one panel for each figure, a bar for each server, a dot for each round; hollow where it was not quiet."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from relay.bench.peers.pairing import Reading
from relay.bench.peers.result import Result
from relay.bench.peers.scenario import SCENARIOS
from relay.bench.peers.table import heading, number
from relay.errors import StartError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS: Final = {"ours": "tab:blue", "llama": "tab:orange", "vllm": "tab:green"}
_COLUMNS: Final = 3


def draw(result: Result, path: Path) -> None:
    """Write it. Raises StartError where the place cannot be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = [(scenario, figure) for scenario in SCENARIOS for figure in scenario.figures]
    rows = -(-len(panels) // _COLUMNS)
    whole = Figure(figsize=(15, 3.4 * rows), layout="constrained")
    FigureCanvasAgg(whole)
    for place, (scenario, figure) in enumerate(panels):
        axes = whole.add_subplot(rows, _COLUMNS, place + 1)
        _panel(axes, result, scenario.key, figure.key)
        better = "more is better" if figure.higher_is_better else "less is better"
        axes.set_title(f"{heading(scenario, figure)} ({better})", fontsize="medium")
    facts = result.facts
    whole.suptitle(f"{result.model}, {facts.cores} cores of {facts.processor}, {result.threads} threads, {facts.date[:10]}, {facts.commit}")
    try:
        whole.savefig(path, dpi=100)
    except (OSError, ValueError) as error:
        raise StartError(f"the plot cannot be written to {path}: {error}") from error


def _panel(axes: "Axes", result: Result, scenario: str, figure: str) -> None:
    shown = [one for one in result.contestants if _readings(result.readings, one.key, scenario, figure)]
    middles = {s.contestant: s.middle for s in result.summaries if (s.scenario, s.figure) == (scenario, figure)}
    for place, one in enumerate(shown):
        colour = _COLOURS[one.family]
        axes.barh(place, middles[one.key], color=colour, alpha=0.35)
        axes.text(middles[one.key], place, f" {number(middles[one.key])}", va="center", fontsize="small")
        for reading in _readings(result.readings, one.key, scenario, figure):
            face = colour if reading.quietness.quiet else "white"
            axes.plot(reading.figures[figure], place, "o", markersize=4, color=colour, markerfacecolor=face)
    axes.set_yticks(range(len(shown)), [one.key for one in shown])
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_xlim(left=0)
    axes.grid(axis="x", alpha=0.3)


def _readings(readings: Sequence[Reading], contestant: str, scenario: str, figure: str) -> list[Reading]:
    return [r for r in readings if (r.contestant, r.scenario) == (contestant, scenario) and figure in r.figures]
