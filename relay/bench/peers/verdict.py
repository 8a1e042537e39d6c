"""From readings to figures, ratios and targets. A ratio is formed within a round and its median taken: a slow minute counts for both.

Rounds in which the machine was not quiet count too, and are counted: leaving them out would hide how often it happened.
"""

from collections.abc import Sequence
from statistics import median
from typing import Final

import msgspec

from relay.bench.peers.loads import LOADS
from relay.bench.peers.rounds import Reading

PEERS: Final = ("llama", "vllm")
BETTER_PEER: Final = "better peer"
AGGREGATED: Final = "aggregated"


class Target(msgspec.Struct, frozen=True):
    """Of the ratio of ours to `against`: a peer, the better of the peers, or our aggregated server. `limit` is the least or the most."""

    load: str
    figure: str
    activations: tuple[str, ...]
    against: str
    limit: float


TARGETS: Final = (
    Target("single", "tpot", ("a16", "a8"), "llama", 0.5),
    Target("single", "ttft", ("a16",), BETTER_PEER, 0.6),
    Target("single", "ttft", ("a8",), BETTER_PEER, 0.4),
    Target("sixteen", "rate", ("a16",), BETTER_PEER, 2.2),
    Target("sixteen", "rate", ("a8",), BETTER_PEER, 3.3),
    Target("prefill", "prefill", ("a16",), "llama", 3.5),
    Target("competed", "rate", ("a16", "a8"), "llama", 3.0),
    Target("sixteen", "rate", ("a16", "a8"), AGGREGATED, 0.9),
)


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """`ratio` and `met` are None where nothing could be compared. `unquiet`: of the `pairs`, those with a run that had noise beside it."""

    load: str
    figure: str
    server: str
    peer: str
    limit: float
    more_is_better: bool
    ratio: float | None
    pairs: int
    unquiet: int
    met: bool | None


def rounds_of(readings: Sequence[Reading], server: str, load: str, figure: str) -> dict[int, Reading]:
    """By round number, those that have the figure."""
    return {r.round_number: r for r in readings if (r.server, r.load) == (server, load) and figure in r.figures}


def middle(readings: Sequence[Reading], server: str, load: str, figure: str) -> float | None:
    """The median of the rounds."""
    found = rounds_of(readings, server, load, figure)
    return median(r.figures[figure] for r in found.values()) if found else None


def ratio(readings: Sequence[Reading], ours: str, theirs: str, load: str, figure: str) -> tuple[float | None, int, int]:
    """The median of ours over theirs, of how many rounds, and how many of them were not quiet."""
    a, b = rounds_of(readings, ours, load, figure), rounds_of(readings, theirs, load, figure)
    both = [(a[number], b[number]) for number in sorted(a) if number in b]
    ratios = [x.figures[figure] / y.figures[figure] for x, y in both]
    return (round(median(ratios), 3) if ratios else None), len(ratios), sum(not (x.quiet and y.quiet) for x, y in both)


def judge(readings: Sequence[Reading]) -> list[Verdict]:
    """Every target, for each of our servers that it is of and that took part."""
    present = dict.fromkeys(reading.server for reading in readings)
    found = []
    for target in TARGETS:
        for activations in target.activations:
            keys = [activations] if target.against == AGGREGATED else [activations, f"{activations}-aggregated"]
            found += [_judge(target, key, readings) for key in keys if key in present]
    return found


def _judge(target: Target, key: str, readings: Sequence[Reading]) -> Verdict:
    figure = next(f for load in LOADS if load.key == target.load for f in load.figures if f.key == target.figure)
    peer = target.against
    if peer == AGGREGATED:
        peer = f"{key}-aggregated"
    elif peer == BETTER_PEER:
        middles = {name: value for name in PEERS if (value := middle(readings, name, target.load, target.figure)) is not None}
        peer = (max if figure.more_is_better else min)(middles, key=lambda name: middles[name], default=BETTER_PEER)
    value, pairs, unquiet = ratio(readings, key, peer, target.load, target.figure)
    return Verdict(
        load=target.load,
        figure=target.figure,
        server=key,
        peer=peer,
        limit=target.limit,
        more_is_better=figure.more_is_better,
        ratio=value,
        pairs=pairs,
        unquiet=unquiet,
        met=None if value is None else value >= target.limit if figure.more_is_better else value <= target.limit,
    )
