"""Metrics of one process, and how those of all processes become one Prometheus page.

Each worker keeps its own registry. On a scrape every worker answers with its families as plain data, and one gateway renders them all
with a `worker` label. Names that OpenTelemetry's GenAI conventions have are theirs (`gen_ai_server_...`), the rest are `relay_...`.
"""

from collections.abc import Iterable, Iterator

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, disable_created_metrics, generate_latest
from prometheus_client.samples import Sample

from relay.ledger.ledger import Ledger
from relay.ledger.spans import Span

disable_created_metrics()  # type: ignore[no-untyped-call]

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
TOKEN_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)

_PARTS = {
    "queue": (
        Span.GATEWAY_QUEUE,
        Span.PREFILL_QUEUE_CAPACITY,
        Span.PREFILL_QUEUE_BLOCKS,
        Span.PREFILL_QUEUE_BEHIND_PREFILL,
        Span.KV_LEASE_WAIT,
        Span.DECODE_QUEUE,
    ),
    "prefill": (Span.PREFILL_HOST, Span.PREFILL_FLOOR, Span.PREFILL_EXCESS, Span.PREFILL_INTERLEAVE),
    "transfer": (Span.KV_PUSH, Span.KV_VERIFY),
    "decode": (
        Span.DECODE_HOST,
        Span.DECODE_FLOOR,
        Span.DECODE_EXCESS,
        Span.DECODE_INTERFERENCE,
        Span.DECODE_PREEMPTED,
    ),
}


class Family(msgspec.Struct, frozen=True, array_like=True):
    """One metric of one process, as it travels: samples are (name, labels, value)."""

    name: str
    kind: str
    help: str
    samples: list[tuple[str, dict[str, str], float]]


class GatewayMetrics:
    """What clients feel, split by the layer that owns it."""

    def __init__(self) -> None:
        self.registry = r = CollectorRegistry()
        self.requests = Counter("relay_requests", "Answered requests", ["route", "status"], registry=r)
        self.in_flight = Gauge("relay_requests_in_flight", "Sequences submitted and not ended", registry=r)
        self.held_bytes = Gauge("relay_gateway_held_bytes", "What running requests may come to take, by what they ask for", registry=r)
        self.events = Counter("relay_attempts", "Attempts by what became of them", ["event"], registry=r)
        self.prompt_tokens = Counter("relay_prompt_tokens", "Prompt tokens of answered requests", registry=r)
        self.cached_tokens = Counter("relay_cached_prompt_tokens", "Of these, found in a prefix cache", registry=r)
        self.generated_tokens = Counter("relay_generated_tokens", "Tokens that reached clients", registry=r)
        self.ttft = Histogram(
            "gen_ai_server_time_to_first_token_seconds", "From the request's first byte to its first token", buckets=SECONDS, registry=r
        )
        self.tpot = Histogram(
            "gen_ai_server_time_per_output_token_seconds",
            "Mean time of a token after the first, by request",
            buckets=TOKEN_SECONDS,
            registry=r,
        )
        self.itl = Histogram("relay_inter_token_seconds", "Between two arrivals of tokens of one choice", buckets=TOKEN_SECONDS, registry=r)
        self.duration = Histogram("gen_ai_server_request_duration_seconds", "Whole request", buckets=SECONDS, registry=r)
        self.parts = {
            part: Histogram(f"relay_{part}_seconds", f"Time a request spent in {part}, from its ledger", buckets=SECONDS, registry=r)
            for part in _PARTS
        }
        self.unaccounted = Histogram(
            "relay_unaccounted_seconds", "Ledger time that no hook claimed", buckets=(0.0001, 0.001, 0.01, 0.1), registry=r
        )
        self.body_bytes = Gauge("relay_body_bytes", "Bytes of request bodies that are being read or understood", registry=r)
        self.body_limit = Gauge("relay_body_bytes_limit", "The most of them (gateway.max_bodies_mib)", registry=r)
        self.bodies_refused = Gauge("relay_bodies_refused", "Requests refused since there was no room for their body", registry=r)
        for event in ("admitted", "retried", "stale", "violation"):
            self.events.labels(event=event)

    def on_event(self, event: str) -> None:
        self.events.labels(event=event).inc()

    def ended(self, ledger: Ledger) -> None:
        """Take a finished request's ledger apart."""
        for part, spans in _PARTS.items():
            self.parts[part].observe(sum(ledger[span] for span in spans) / 1e9)
        self.unaccounted.observe(ledger[Span.UNACCOUNTED] / 1e9)
        self.duration.observe(ledger.wall_ns / 1e9)


class RouterMetrics:
    """What waits and what is placed."""

    def __init__(self) -> None:
        self.registry = r = CollectorRegistry()
        self.queued = Gauge("relay_router_queued", "Attempts waiting for a place", registry=r)
        self.queued_bytes = Gauge("relay_router_queued_bytes", "What they take, at most", registry=r)
        self.placed = Gauge("relay_router_placed", "Attempts that hold a place", registry=r)


def families(registry: CollectorRegistry) -> list[Family]:
    """A registry as plain data."""
    return [
        Family(metric.name, metric.type, metric.documentation, [(s.name, dict(s.labels), s.value) for s in metric.samples])
        for metric in registry.collect()
    ]


class _Merged:
    """Looks like a registry to `generate_latest`."""

    def __init__(self, by_worker: Iterable[tuple[str, list[Family]]]) -> None:
        self._metrics: dict[str, Metric] = {}
        for worker, some in by_worker:
            for family in some:
                metric = self._metrics.setdefault(family.name, Metric(family.name, family.help, family.kind))
                metric.samples += [Sample(name, {"worker": worker, **labels}, value) for name, labels, value in family.samples]

    def collect(self) -> Iterator[Metric]:
        yield from self._metrics.values()


def render(by_worker: Iterable[tuple[str, list[Family]]]) -> bytes:
    """One page in Prometheus' text format."""
    return generate_latest(_Merged(by_worker))
