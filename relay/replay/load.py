"""What is asked of the cluster: rows of a trace, and two loads that are hard for placement by prefix.

Token ids stand for texts. Those of a segment are its own: equal keys are equal ids, and nothing else is.
"""

import random
from collections.abc import Iterable, Sequence
from itertools import count

import msgspec

from relay.bench.schedule import Planned, Segment, arrivals, replay
from relay.bench.trace import Row
from relay.replay.machine import ANSWER, BLOCK_TOKENS, StepCost

LENGTH_SCALE = 1 / 32  # makes a Mooncake block of 512 tokens one KV block


class Visit(msgspec.Struct, frozen=True, gc=False):
    """One request. `at_s` is after the first."""

    at_s: float
    prompt: tuple[int, ...]
    n_answer: int


class Bound(msgspec.Struct, frozen=True, kw_only=True):
    """What one cache without end, which knows each prompt from its arrival on, would find. prefill_s: seconds to compute the rest."""

    n_prompt: int
    n_cached: int
    prefill_s: float

    @property
    def hit_rate(self) -> float:
        return self.n_cached / max(1, self.n_prompt)


def trace_load(rows: Sequence[Row], length_scale: float = LENGTH_SCALE) -> list[Visit]:
    """At the trace's own pace."""
    return _visits(replay(rows, length_scale=length_scale, time_scale=1.0, duration_s=None))


def one_prefix(n: int, *, prefix: int = 1024, own: int = 64, n_answer: int = 8, seed: int = 0) -> list[Visit]:
    """Poisson arrivals that all begin alike: whoever has the prefix in its cache is wanted by everybody (sglang#21199)."""
    times = arrivals(1.0, 1.0, float("inf"), seed)
    planned = (
        Planned(index=i, at_s=next(times), prompt=(Segment("shared", prefix), Segment(f"own/{i}", own)), output_tokens=n_answer)
        for i in range(n)
    )
    return _visits(planned)


def bursts(n: int, *, n_prefixes: int = 8, size: int = 16, own: int = 64, n_answer: int = 8, seed: int = 0) -> list[Visit]:
    """`size` requests at once with one of some prefixes of 256 to 2,048 tokens, drawn anew for each burst; every other burst's prefix is
    new to all."""
    draw, times = random.Random(f"bursts/{seed}"), arrivals(1.0 / size, 1.0, float("inf"), seed)
    hot = [Segment(f"hot/{i}", draw.randrange(256, 2049, BLOCK_TOKENS)) for i in range(n_prefixes)]
    planned: list[Planned] = []
    for burst in range(n // size):
        at_s = next(times)
        prefix = draw.choice(hot) if burst % 2 else Segment(f"new/{burst}", draw.randrange(256, 2049, BLOCK_TOKENS))
        for _ in range(size):
            i = len(planned)
            planned.append(Planned(index=i, at_s=at_s, prompt=(prefix, Segment(f"own/{i}", own)), output_tokens=n_answer))
    return _visits(planned)


def bound(visits: Iterable[Visit], cost: StepCost) -> Bound:
    """Blocks are matched as everywhere: full ones from the first on, and never a prompt's last token."""
    seen: dict[tuple[int, int], int] = {(0, ANSWER): 0}  # (number of the chain so far, first id of its next block)
    n_prompt = n_cached = 0
    prefill_ms = 0.0
    for visit in visits:
        chain, n_found, fresh = 0, 0, False
        for at in range(0, len(visit.prompt) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            key = chain, visit.prompt[at]
            fresh = fresh or key not in seen
            chain = seen.setdefault(key, len(seen))
            n_found += not fresh and at + BLOCK_TOKENS < len(visit.prompt)
        n_prompt += len(visit.prompt)
        n_cached += n_found * BLOCK_TOKENS
        prefill_ms += cost.prompt_ms(n_found * BLOCK_TOKENS, len(visit.prompt))
    return Bound(n_prompt=n_prompt, n_cached=n_cached, prefill_s=prefill_ms / 1e3)


def paced(visits: Sequence[Visit], load: float, n_prefill: int, cost: StepCost) -> list[Visit]:
    """With gaps such that `n_prefill` workers with one endless cache would compute for this share of the time."""
    span_s = bound(visits, cost).prefill_s / n_prefill / load
    scale = span_s / max(visits[-1].at_s, 1e-9)
    return [msgspec.structs.replace(visit, at_s=visit.at_s * scale) for visit in visits]


def _visits(planned: Iterable[Planned]) -> list[Visit]:
    first: dict[str, int] = {}
    ids = count(ANSWER + 1, 4096)
    visits = []
    for each in planned:
        prompt: list[int] = []
        for segment in each.prompt:
            if segment.key not in first:
                first[segment.key] = next(ids)
            prompt += range(first[segment.key], first[segment.key] + segment.tokens)
        visits.append(Visit(each.at_s, tuple(prompt), each.output_tokens))
    return visits
