"""From single runs to figures: the median of the rounds, and the median of the ratios within each round.

Servers are measured in turn, A B A B, so that what slows the machine for a minute slows both of a pair; a ratio is formed only within a
round. Figures of rounds in which the machine was not quiet count, and are counted: hiding them would hide how often it happened.
"""

from collections.abc import Iterable, Sequence
from statistics import median

import msgspec

from relay.bench.peers.quiet import Quietness


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """One server under one load, once. `cpu_s` by process of the server; `figures` by key; `report` is what `relay bench` said."""

    contestant: str
    scenario: str
    round_number: int
    figures: dict[str, float]
    failed: int
    short: int
    cpu_s: dict[str, float]
    output_tokens: int
    saturated: str
    quietness: Quietness
    command: list[str]


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of one server: `values` by round, `unquiet` of which were measured while the machine was not quiet."""

    contestant: str
    scenario: str
    figure: str
    values: list[float]
    middle: float
    unquiet: int
    rounds: int
    failed: int


def summarize(readings: Sequence[Reading]) -> list[Summary]:
    """In the order in which servers, loads and figures first come."""
    grouped: dict[tuple[str, str, str], list[Reading]] = {}
    for reading in readings:
        for figure in reading.figures:
            grouped.setdefault((reading.contestant, reading.scenario, figure), []).append(reading)
    return [
        Summary(
            contestant=contestant,
            scenario=scenario,
            figure=figure,
            values=[reading.figures[figure] for reading in some],
            middle=median(reading.figures[figure] for reading in some),
            unquiet=sum(not reading.quietness.quiet for reading in some),
            rounds=len(some),
            failed=sum(reading.failed for reading in some),
        )
        for (contestant, scenario, figure), some in grouped.items()
    ]


def by_round(readings: Iterable[Reading], contestant: str, scenario: str, figure: str) -> dict[int, float]:
    """The figure in each round that has it."""
    return {
        reading.round_number: reading.figures[figure]
        for reading in readings
        if reading.contestant == contestant and reading.scenario == scenario and figure in reading.figures
    }


def paired_ratios(ours: dict[int, float], theirs: dict[int, float]) -> list[float]:
    """Ours over theirs, of the rounds that have both."""
    return [ours[number] / theirs[number] for number in sorted(ours) if theirs.get(number)]


def best_of(peers: Sequence[dict[int, float]], *, higher_is_better: bool) -> dict[int, float]:
    """The peer that is better by its median, whole: its rounds stay together. Empty if there is none."""
    filled = [peer for peer in peers if peer]
    if not filled:
        return {}
    choose = max if higher_is_better else min
    return choose(filled, key=lambda peer: median(peer.values()))
