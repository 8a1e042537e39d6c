"""A record as Markdown and as a picture: figures, ratios, targets, how quiet the machine was, and the commands."""

import shlex
from collections.abc import Iterator
from pathlib import Path

from relay.bench.peers.loads import LOADS, OUTPUT_TOKENS, PROMPT_TOKENS, Figure, Load
from relay.bench.peers.record import Record
from relay.bench.peers.rounds import MOST_OTHERS, MOST_STEAL
from relay.bench.peers.verdict import PEERS, judge, middle, ratio, rounds_of
from relay.errors import StartError

COLUMNS = [(load, figure) for load in LOADS for figure in load.figures]


def markdown(record: Record) -> str:
    """The whole page."""
    return "\n".join(_lines(record)) + "\n"


def _lines(record: Record) -> Iterator[str]:
    facts = record.facts
    rounds = len({reading.round_number for reading in record.readings})
    yield f"# RelayServe and its peers, {facts.date[:10]}\n"
    yield f"- {facts.cores} cores of {facts.processor} ({', '.join(facts.instructions)}), {facts.memory_gib:g} GiB, Linux {facts.kernel},"
    yield f"  Python {facts.python}; commit {facts.commit}; {record.model}"
    yield f"- over HTTP by `relay bench` on the same machine: prompts of {PROMPT_TOKENS} tokens, {OUTPUT_TOKENS} new tokens, greedy; every"
    yield f"  server with {record.threads} threads; {rounds} rounds, servers in turn within each load; medians of rounds and of ratios"
    yield "- ours speculate by n-grams unless `plain`; the peers as they come do not speculate"
    for server in record.servers:
        yield f"- `{server.key}`: {server.name}, {server.version}"
    for name, why in record.absent.items():
        yield f"- {name} took no part: {' '.join(why.split())}"
    noisy = [reading for reading in record.readings if not reading.quiet]
    averages = [reading.load_average for reading in record.readings] or [0.0]
    yield f"- load average before a run: {min(averages):.1f} to {max(averages):.1f}; in {len(noisy)} of {len(record.readings)} runs others"
    yield f"  took over {MOST_OTHERS:.0%} of the cores, or the hypervisor over {MOST_STEAL:.0%}\n"
    yield from _row("server", *(f"{load.name}: {figure.name}" for load, figure in COLUMNS))
    yield "|---|" + "---:|" * len(COLUMNS)
    for server in record.servers:
        yield from _row(server.name, *(_cell(record, server.key, load, figure) for load, figure in COLUMNS))
    for ours in record.servers:
        for peer in record.servers:
            if ours.key not in PEERS and peer.key in PEERS:
                ratios = (ratio(record.readings, ours.key, peer.key, load.key, figure.key)[0] for load, figure in COLUMNS)
                yield from _row(f"{ours.key} / {peer.key}", *("-" if value is None else f"{value:.2f}" for value in ratios))
    yield "\n## Targets\n"
    yield from _row("server", "compared with", "figure", "ratio", "wanted", "", "pairs", "not quiet")
    yield "|---|---|---|---:|---:|---|---:|---:|"
    for verdict in judge(record.readings):
        name = next(f"{load.name}: {figure.name}" for load, figure in COLUMNS if (load.key, figure.key) == (verdict.load, verdict.figure))
        wanted = f"{'at least' if verdict.more_is_better else 'at most'} {verdict.limit:g}"
        word = "not measured" if verdict.met is None else "met" if verdict.met else "**not met**"
        if verdict.pairs and verdict.pairs == verdict.unquiet:
            word += ", never quiet"
        value = "-" if verdict.ratio is None else f"{verdict.ratio:.2f}"
        yield from _row(f"`{verdict.server}`", f"`{verdict.peer}`", name, value, wanted, word, str(verdict.pairs), str(verdict.unquiet))
    if noisy:
        yield "\n## Runs while the machine was not quiet\n"
        yield from _row("round", "load", "server", "load average", "others", "stolen", "memory, GB/s")
        yield "|---:|---|---|---:|---:|---:|---:|"
        for r in noisy:
            shares = (f"{r.load_average:.1f}", f"{r.others:.1%}", f"{r.steal:.1%}", f"{r.memory_gb_per_s:.1f}")
            yield from _row(str(r.round_number + 1), r.load, f"`{r.server}`", *shares)
    yield "\n## Commands\n\n```sh"
    for server in record.servers:
        yield " ".join([*(f"{name}={value}" for name, value in server.environment.items()), shlex.join(server.command)])
    for load in LOADS:
        yield from (f"{shlex.join(r.command)}  # {load.name}" for r in [r for r in record.readings if r.load == load.key][:1])
    yield "```"


def _row(*cells: str) -> Iterator[str]:
    yield f"| {' | '.join(cells)} |"


def _cell(record: Record, server: str, load: Load, figure: Figure) -> str:
    value = middle(record.readings, server, load.key, figure.key)
    wrong = sum(r.failed + r.short for r in record.readings if (r.server, r.load) == (server, load.key))
    return ("-" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.1f}") + (f" ({wrong} failed or short)" if wrong else "")


def draw(record: Record, path: Path) -> None:
    """A panel for each figure, a bar for each server's median, a dot for each round; hollow where it was not quiet. Raises StartError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Picture

    picture = Picture(figsize=(14, 11), layout="constrained")
    FigureCanvasAgg(picture)
    keys = [server.key for server in record.servers]
    for place, (load, figure) in enumerate(COLUMNS):
        axes = picture.add_subplot(-(-len(COLUMNS) // 2), 2, place + 1)
        axes.set_title(f"{load.name}: {figure.name} ({'more' if figure.more_is_better else 'less'} is better)", fontsize="medium")
        for at, key in enumerate(keys):
            colour = "tab:orange" if key in PEERS else "tab:blue"
            axes.barh(at, middle(record.readings, key, load.key, figure.key) or 0.0, color=colour, alpha=0.35)
            for r in rounds_of(record.readings, key, load.key, figure.key).values():
                axes.plot(r.figures[figure.key], at, "o", markersize=4, color=colour, markerfacecolor=colour if r.quiet else "white")
        axes.set_yticks(range(len(keys)), keys)
        axes.invert_yaxis()
        axes.grid(axis="x", alpha=0.3)
    facts = record.facts
    picture.suptitle(f"{facts.cores} cores of {facts.processor}, {record.threads} threads, {facts.date[:10]}, {facts.commit}")
    try:
        picture.savefig(path, dpi=100)
    except OSError as error:
        raise StartError(f"the picture cannot be written to {path}: {error}") from error
