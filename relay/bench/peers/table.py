"""The result as Markdown: the figures, the targets, where our time went, how quiet it was, and how to repeat it."""

import shlex
from collections.abc import Iterator, Sequence
from typing import Final

from relay.bench.peers.pairing import Reading, Summary
from relay.bench.peers.result import Result
from relay.bench.peers.scenario import OUTPUT_TOKENS, PROMPT_TOKENS, SCENARIOS, Figure, Scenario
from relay.bench.peers.verdict import Verdict
from relay.bench.peers.whereabouts import Whereabouts

_MARK: Final = "\\*"
_MOST_SPANS: Final = 7


def markdown(result: Result) -> str:
    """The whole page."""
    return "\n".join(_lines(result)) + "\n"


def _lines(result: Result) -> Iterator[str]:
    facts = result.facts
    yield f"# RelayServe and its peers, {facts.date[:10]}"
    yield ""
    yield from _facts(result)
    yield ""
    yield from figures_table(result)
    yield ""
    yield from _remarks(result)
    yield "## Targets"
    yield ""
    yield from verdict_table(result.verdicts, {one.key: one.name for one in result.contestants})
    if result.whereabouts:
        yield ""
        yield "## Where our time went"
        yield ""
        yield from whereabouts_table(result.whereabouts)
    yield ""
    yield "## How quiet the machine was"
    yield ""
    yield from quietness_table(result.readings)
    yield ""
    yield "## Commands"
    yield ""
    yield from _commands(result)


def _facts(result: Result) -> Iterator[str]:
    facts = result.facts
    virtual = ", a virtual machine" if facts.hypervisor else ""
    yield f"- {facts.cores} cores of {facts.processor} ({', '.join(facts.instructions)}){virtual}, {facts.memory_gib:g} GiB,"
    yield f"  Linux {facts.kernel}, huge pages `{facts.huge_pages}`, Python {facts.python}; {facts.date}; commit {facts.commit}."
    yield f"- {result.model}; prompts of {PROMPT_TOKENS} tokens, {OUTPUT_TOKENS} new tokens, greedy, past the end of text; over HTTP,"
    yield f"  `relay bench` on the same machine; every server with {result.threads} threads."
    quick = " A quick run: few requests." if result.quick else ""
    yield f"- {result.rounds} rounds, servers in turn within each load; figures are medians of rounds, ratios medians of pairs.{quick}"
    for one in result.contestants:
        yield f"- {one.name} (`{one.key}`): {one.version}."
    for name, why in result.absent.items():
        yield f"- {name} took no part: {' '.join(why.split())}"


def figures_table(result: Result) -> Iterator[str]:
    """A row for each server, a column for each figure."""
    columns = [(scenario, figure) for scenario in SCENARIOS for figure in scenario.figures]
    yield "| server | " + " | ".join(heading(scenario, figure) for scenario, figure in columns) + " |"
    yield "|---|" + "---:|" * len(columns)
    found = {(summary.contestant, summary.scenario, summary.figure): summary for summary in result.summaries}
    for one in result.contestants:
        cells = [_cell(found.get((one.key, scenario.key, figure.key))) for scenario, figure in columns]
        yield f"| {one.name} | " + " | ".join(cells) + " |"


def heading(scenario: Scenario, figure: Figure) -> str:
    """`16 streams: output, tokens/s`."""
    return f"{scenario.name}: {figure.name}, {figure.unit}"


def _cell(summary: Summary | None) -> str:
    if summary is None:
        return "-"
    failed = f" ({summary.failed} failed)" if summary.failed else ""
    return f"{number(summary.middle)}{_MARK if summary.unquiet else ''}{failed}"


def number(value: float) -> str:
    """Three digits or so."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _remarks(result: Result) -> Iterator[str]:
    unquiet = sum(not reading.quietness.quiet for reading in result.readings)
    if unquiet:
        yield f"{_MARK} some of its rounds were measured while the machine was not quiet: {unquiet} of {len(result.readings)} runs in all."
        yield ""
    if result.interrupted:
        yield "Stopped by hand before the last round."
        yield ""
    for note in result.notes:
        yield f"{note}"
        yield ""


def verdict_table(verdicts: Sequence[Verdict], names: dict[str, str]) -> Iterator[str]:
    """Each target beside what came of it."""
    yield "| target | server | compared with | ratio | wanted | |"
    yield "|---|---|---|---:|---:|---|"
    for verdict in verdicts:
        sign = "at least" if " at least " in verdict.words or "within" in verdict.words else "at most"
        ratio = "-" if verdict.ratio is None else f"{verdict.ratio:.2f}{_MARK if verdict.unquiet else ''}"
        word = "not measured" if verdict.met is None else "met" if verdict.met else "**not met**"
        peer = names.get(verdict.peer, verdict.peer)
        ours, peer = (names.get(key, key) for key in (verdict.contestant, verdict.peer))
        yield f"| {verdict.words} | {ours} | {peer} | {ratio} | {sign} {verdict.limit:g} | {word} |"


def whereabouts_table(some: Sequence[Whereabouts]) -> Iterator[str]:
    """The largest spans, from the ledgers of the measured requests."""
    yield "| server | load | to the first token, ms | each token after it, µs | CPU of each process, µs per token |"
    yield "|---|---|---|---|---|"
    for one in some:
        cells = [_spans(values) for values in (one.first_token_ms, one.each_token_us, one.cpu_us_per_token)]
        yield f"| `{one.contestant}` | {one.scenario} | " + " | ".join(cells) + " |"


def _spans(values: dict[str, float]) -> str:
    kept = list(values.items())[:_MOST_SPANS]
    return f"**{number(sum(values.values()))}**: " + ", ".join(f"{name} {number(value)}" for name, value in kept) if kept else "-"


def quietness_table(readings: Sequence[Reading]) -> Iterator[str]:
    """A row for each run, those that were not quiet with the reason."""
    yield "| round | load | server | load average | others | idle peers | stolen | spin, ms | sweep, GB/s | not quiet because |"
    yield "|---:|---|---|---:|---:|---:|---:|---:|---:|---|"
    for reading in readings:
        q = reading.quietness
        reasons = [*q.reasons, *([f"the generator was saturated: {reading.saturated}"] if reading.saturated else [])]
        yield (
            f"| {reading.round_number + 1} | {reading.scenario} | `{reading.contestant}` | {q.load_before:.1f} | {q.others_share:.1%} "
            f"| {q.idle_peers_share:.1%} | {q.steal_share:.1%} | {q.before.spin_ms:.1f}, {q.after.spin_ms:.1f} "
            f"| {q.before.sweep_gb_per_s:.1f}, {q.after.sweep_gb_per_s:.1f} | {'; '.join(reasons)} |"
        )


def _commands(result: Result) -> Iterator[str]:
    yield "```sh"
    for one in result.contestants:
        environment = [f"{name}={value}" for name, value in one.environment.items()]
        yield " ".join([*environment, shlex.join(one.command)])
    seen: set[str] = set()
    for reading in result.readings:
        if reading.scenario not in seen:
            seen.add(reading.scenario)
            yield f"{shlex.join(reading.command)}  # {reading.scenario}"
    yield "```"
