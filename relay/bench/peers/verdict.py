"""What we set ourselves, and whether it is met: each target is a ratio of one of our servers to a peer, or to another of ours."""

from collections.abc import Sequence
from statistics import median
from typing import Final, Literal

import msgspec

from relay.bench.peers.pairing import Reading, best_of, by_round, paired_ratios

PEERS: Final = ("llama", "vllm")
Against = Literal["llama", "better peer", "aggregated"]


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """`limit` is the least ratio where higher is better, else the most."""

    scenario: str
    figure: str
    activations: tuple[str, ...]
    against: Against
    limit: float
    higher_is_better: bool
    words: str


TARGETS: Final = (
    Target(
        scenario="single",
        figure="tpot",
        activations=("a16", "a8"),
        against="llama",
        limit=0.5,
        higher_is_better=False,
        words="TPOT of 1 stream at most 1/2 of llama.cpp's",
    ),
    Target(
        scenario="single",
        figure="ttft",
        activations=("a16",),
        against="better peer",
        limit=0.6,
        higher_is_better=False,
        words="TTFT at most 0.6 of the better peer's",
    ),
    Target(
        scenario="single",
        figure="ttft",
        activations=("a8",),
        against="better peer",
        limit=0.4,
        higher_is_better=False,
        words="TTFT at most 0.4 of the better peer's",
    ),
    Target(
        scenario="sixteen",
        figure="rate",
        activations=("a16",),
        against="better peer",
        limit=2.2,
        higher_is_better=True,
        words="16 streams at least 2.2 times the better peer's tokens/s",
    ),
    Target(
        scenario="sixteen",
        figure="rate",
        activations=("a8",),
        against="better peer",
        limit=3.3,
        higher_is_better=True,
        words="16 streams at least 3.3 times the better peer's tokens/s",
    ),
    Target(
        scenario="prefill",
        figure="rate",
        activations=("a16",),
        against="llama",
        limit=3.5,
        higher_is_better=True,
        words="prefill of 2,000 tokens at least 3.5 times llama.cpp's",
    ),
    Target(
        scenario="sixteen",
        figure="rate",
        activations=("a16", "a8"),
        against="aggregated",
        limit=0.9,
        higher_is_better=True,
        words="disaggregated within 10 % of aggregated at 16 streams",
    ),
    Target(
        scenario="competed",
        figure="rate",
        activations=("a16", "a8"),
        against="llama",
        limit=3.0,
        higher_is_better=True,
        words="beside a busy process at least 3 times llama.cpp's tokens/s",
    ),
)


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """`ratio` is the median of the pairs, None where nothing could be compared; `peer` is whom it was compared with.

    `unquiet`: how many of the pairs had a run in which the machine was not quiet."""

    words: str
    contestant: str
    peer: str
    limit: float
    ratio: float | None
    pairs: int
    unquiet: int
    met: bool | None


def judge_all(readings: Sequence[Reading]) -> list[Verdict]:
    """Every target for each of our servers that it is of and that took part."""
    found = []
    present = dict.fromkeys(reading.contestant for reading in readings)
    for target in TARGETS:
        for activations in target.activations:
            keys = [activations] if target.against == "aggregated" else [activations, aggregated(activations)]
            found += [_judge(target, key, readings) for key in keys if key in present]
    return found


def aggregated(key: str) -> str:
    """The same server with both roles in one worker."""
    return f"{key}-aggregated"


def _judge(target: Target, key: str, readings: Sequence[Reading]) -> Verdict:
    def rounds(contestant: str) -> dict[int, float]:
        return by_round(readings, contestant, target.scenario, target.figure)

    match target.against:
        case "llama":
            candidates = ["llama"]
        case "better peer":
            candidates = list(PEERS)
        case "aggregated":
            candidates = [aggregated(key)]
    theirs = {candidate: rounds(candidate) for candidate in candidates}
    best = best_of(list(theirs.values()), higher_is_better=target.higher_is_better)
    peer = next((name for name, values in theirs.items() if values is best), target.against)
    ours = rounds(key)
    ratios = paired_ratios(ours, best)
    ratio = median(ratios) if ratios else None
    return Verdict(
        words=target.words,
        contestant=key,
        peer=peer,
        limit=target.limit,
        ratio=ratio,
        pairs=len(ratios),
        unquiet=_unquiet(readings, target.scenario, key, peer, set(ours) & set(best)),
        met=None if ratio is None else ratio >= target.limit if target.higher_is_better else ratio <= target.limit,
    )


def _unquiet(readings: Sequence[Reading], scenario: str, ours: str, peer: str, rounds: set[int]) -> int:
    """Rounds in which either run of the pair was not quiet."""
    return len(
        {
            reading.round_number
            for reading in readings
            if reading.scenario == scenario
            and reading.contestant in (ours, peer)
            and reading.round_number in rounds
            and not reading.quietness.quiet
        }
    )
