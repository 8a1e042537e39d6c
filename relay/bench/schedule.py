"""What is to be sent and when: lengths, arrivals or a trace in, planned requests out. Pure, and the same for the same seed."""

import random
from collections.abc import Iterator, Sequence
from itertools import count

import msgspec

from relay.bench.lengths import Lengths
from relay.bench.trace import BLOCK_TOKENS, Row


class Segment(msgspec.Struct, frozen=True, gc=False):
    """The first `tokens` of the endless run of tokens that belongs to `key`: equal keys are equal beginnings."""

    key: str
    tokens: int


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """`at_s` is after the start of the measurement; a closed loop sends when a stream is free instead."""

    index: int
    at_s: float
    prompt: tuple[Segment, ...]
    output_tokens: int

    @property
    def prompt_tokens(self) -> int:
        return sum(segment.tokens for segment in self.prompt)


class Clipped(msgspec.Struct, kw_only=True):
    """What did not fit into the context, and so was not asked of the server."""

    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """Prompts drawn from distributions; the first `shared_prefix` tokens are the same in all of them."""

    prompt: Lengths
    output: Lengths
    shared_prefix: int
    seed: int

    def requests(self, arrivals: Iterator[float], *, name: str = "own") -> Iterator[Planned]:
        """One for each arrival. Another `name` gives other contents of the same lengths."""
        lengths = random.Random(f"lengths/{self.seed}")
        for index, at_s in enumerate(arrivals):
            n = self.prompt.draw(lengths)
            shared = min(self.shared_prefix, n)
            segments = (Segment("shared", shared), Segment(f"{name}/{index}", n - shared))
            prompt = tuple(segment for segment in segments if segment.tokens)
            yield Planned(index=index, at_s=at_s, prompt=prompt, output_tokens=self.output.draw(lengths))


def at_once(n: int) -> Iterator[float]:
    """For a closed loop."""
    return iter([0.0] * n)


def arrivals(rate: float, burstiness: float, duration_s: float, seed: int) -> Iterator[float]:
    """Gaps from a gamma distribution of shape `burstiness` and mean 1 / `rate`: 1 is Poisson, less is burstier, more is steadier."""
    source = random.Random(f"arrivals/{seed}")
    at_s = 0.0
    while True:
        at_s += source.gammavariate(burstiness, 1 / (rate * burstiness))
        if at_s >= duration_s:
            return
        yield at_s


def replay(rows: Sequence[Row], *, length_scale: float, time_scale: float, duration_s: float | None) -> Iterator[Planned]:
    """The trace with all lengths times `length_scale` and all gaps times `time_scale`, up to `duration_s` of the replay."""
    for index, row in enumerate(rows):
        at_s = row.at_s * time_scale
        if duration_s is not None and at_s >= duration_s:
            return
        yield Planned(
            index=index,
            at_s=at_s,
            prompt=_blocks(row, index, length_scale),
            output_tokens=max(1, round(row.output_tokens * length_scale)),
        )


def _blocks(row: Row, index: int, scale: float) -> tuple[Segment, ...]:
    """Block edges are scaled and then rounded, so that equal beginnings stay equal whatever the scale."""
    n = max(1, round(row.prompt_tokens * scale))
    segments, at = [], 0
    for place, hash_id in zip(count(1), row.hash_ids, strict=False):
        edge = min(n, round(place * BLOCK_TOKENS * scale))
        if edge > at:
            segments.append(Segment(f"block/{hash_id}", edge - at))
            at = edge
    if at < n:
        segments.append(Segment(f"own/{index}", n - at))
    return tuple(segments)


def clip(planned: Planned, max_context: int, clipped: Clipped) -> Planned:
    """Cut to what the server can hold: the answer to half of the context at most, then the end of the prompt. Counts what it cuts."""
    n_prompt = planned.prompt_tokens
    if n_prompt + planned.output_tokens <= max_context:
        return planned
    output = min(planned.output_tokens, max(1, max_context // 2))
    room = max(1, max_context - output)
    segments, left = [], room
    for segment in planned.prompt:
        if left:
            segments.append(Segment(segment.key, min(segment.tokens, left)))
            left -= segments[-1].tokens
    cut = msgspec.structs.replace(planned, prompt=tuple(segments), output_tokens=output)
    clipped.requests += 1
    clipped.prompt_tokens += n_prompt - cut.prompt_tokens
    clipped.output_tokens += planned.output_tokens - output
    return cut
