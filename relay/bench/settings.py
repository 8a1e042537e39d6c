"""What a run is told to do: the mode, the lengths, the server; and the plan of requests that follows from it."""

import msgspec

from relay.bench.dialect import EndpointName, SamplingName
from relay.bench.lengths import Lengths
from relay.bench.schedule import Planned, Segment, Workload, arrivals, at_once, replay
from relay.bench.slo import Slo
from relay.bench.trace import Row


class Closed(msgspec.Struct, frozen=True, tag="closed", tag_field="mode"):
    """So many streams, each asking again when it is answered."""

    concurrency: int
    requests: int


class Open(msgspec.Struct, frozen=True, tag="open", tag_field="mode"):
    """Requests by a rate, whatever the server does."""

    rate: float
    burstiness: float
    duration_s: float


class Replay(msgspec.Struct, frozen=True, tag="trace", tag_field="mode"):
    """Requests as a trace has them."""

    trace: str
    length_scale: str
    time_scale: float
    duration_s: float | None


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """`rows` are the trace's; `length_scale` is the number that `Replay` has in words; token ids go from `token_ids[0]` up to `[1]`."""

    url: str
    key: str | None
    model: str | None
    endpoint: EndpointName
    mode: Closed | Open | Replay
    rows: list[Row]
    length_scale: float
    prompt_tokens: Lengths
    output_tokens: Lengths
    shared_prefix: int
    sampling: SamplingName
    seed: int
    token_ids: tuple[int, int]
    max_context: int | None
    warmup: int
    timeout_s: float
    slo: Slo | None

    def plan(self) -> list[Planned]:
        """Every request of the measurement."""
        workload = Workload(prompt=self.prompt_tokens, output=self.output_tokens, shared_prefix=self.shared_prefix, seed=self.seed)
        match self.mode:
            case Closed(requests=n):
                return list(workload.requests(at_once(n)))
            case Open(rate=rate, burstiness=burstiness, duration_s=duration_s):
                return list(workload.requests(arrivals(rate, burstiness, duration_s, self.seed)))
            case Replay(time_scale=time_scale, duration_s=limit_s):
                return list(replay(self.rows, length_scale=self.length_scale, time_scale=time_scale, duration_s=limit_s))


def warm_up(plan: list[Planned], n: int) -> list[Planned]:
    """The first `n` with contents of their own, so that they leave nothing in a cache that the measurement asks for but a shared prefix."""
    return [
        msgspec.structs.replace(
            planned, prompt=tuple(s if s.key == "shared" else Segment(f"warm/{s.key}", s.tokens) for s in planned.prompt)
        )
        for planned in plan[:n]
    ]
