"""What a run says: records in, one object out, which is what `--json` prints. Its keys are stable; `relay.bench` explains the words.

| key | what it is |
|---|---|
| `schema` | 1; a number that changes when a key changes its meaning |
| `tool` | `relay bench` and its version |
| `date` | UTC, ISO 8601, when the measurement began |
| `url`, `model`, `endpoint` | what was asked |
| `mode` | `closed`, `open` or `trace`, and its settings: a flat object |
| `workload` | lengths, shared prefix, sampling, seed: a flat object; `prompts` is `token_ids` or `text` |
| `clipped` | requests, prompt tokens and output tokens that the context had no room for |
| `notes` | what the server does not take, and what was done instead |
| `interrupted` | stopped by hand |
| `unfinished` | requests that were in flight then, and are in no figure |
| `duration_s` | from the first start to the last end |
| `requests` | `sent` (= `ok` + `failed`), `ok`, `failed`, `failures` by kind, `short` (ok, fewer tokens than asked for), `without_text` |
| `messages` | for each kind of failure, the first words that came with it |
| `ttft_ms`, `tpot_ms`, `itl_ms`, `e2e_ms` | `n`, `mean`, `p50`, `p90`, `p99`, `min`, `max` of ok requests; null without any |
| `send_lag_ms` | sent - meant to be sent, of all requests |
| `output_tokens`, `prompt_tokens`, `chunks` | sums of ok requests; a token without text of its own makes no chunk |
| `output_tokens_per_s`, `prompt_tokens_per_s`, `requests_per_s` | of ok requests over `duration_s` |
| `cached_prompt_tokens`, `cached_share` | by usage, of requests whose usage has it; null if none has |
| `slo` | null, or the limits in seconds, `requests_share`, `requests_per_s`, `output_tokens_per_s` inside of them |
| `generator` | `saturated` and why, `cpu_share` of a core, `cpu_us_per_token`, lag of its loop, waiting for a core |
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from relay.bench.meter import Generator
from relay.bench.record import Record
from relay.bench.schedule import Clipped
from relay.bench.slo import Slo
from relay.bench.statistic import Distribution, distribution


class Requests(msgspec.Struct, frozen=True, kw_only=True):
    sent: int
    ok: int
    failed: int
    failures: dict[str, int]
    short: int
    without_text: int


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    limits: Slo
    requests_share: float
    requests_per_s: float
    output_tokens_per_s: float


class Context(msgspec.Struct, frozen=True, kw_only=True):
    """What is known before the first request."""

    tool: str
    date: str
    url: str
    model: str
    endpoint: str
    mode: dict[str, Any]
    workload: dict[str, Any]
    clipped: Clipped
    notes: list[str]


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What is known after the last one."""

    interrupted: bool
    unfinished: int
    duration_s: float
    requests: Requests
    messages: dict[str, str]
    ttft_ms: Distribution | None
    tpot_ms: Distribution | None
    itl_ms: Distribution | None
    e2e_ms: Distribution | None
    send_lag_ms: Distribution | None
    output_tokens: int
    prompt_tokens: int
    chunks: int
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    requests_per_s: float
    cached_prompt_tokens: int | None
    cached_share: float | None
    slo: Goodput | None
    generator: Generator


class Report(msgspec.Struct, frozen=True):
    context: Context
    measured: Measured

    def to_json(self) -> bytes:
        """The one object, flat on top."""
        parts = (msgspec.to_builtins(self.context), msgspec.to_builtins(self.measured))
        return msgspec.json.encode({"schema": 1, **parts[0], **parts[1]})


def measure(records: Sequence[Record], *, slo: Slo | None, generator: Generator, interrupted: bool, unfinished: int) -> Measured:
    """The arithmetic of a run."""
    ok = [record for record in records if record.ok]
    failed = [record for record in records if not record.ok]
    duration_s = max((r.end_s for r in records), default=0.0) - min((r.start_s for r in records), default=0.0)
    output = sum(record.tokens for record in ok)
    prompt = sum(_prompt(record) for record in ok)
    told = [record for record in ok if record.cached_tokens is not None]
    cached = sum(record.cached_tokens or 0 for record in told) if told else None
    return Measured(
        interrupted=interrupted,
        unfinished=unfinished,
        duration_s=round(duration_s, 4),
        requests=Requests(
            sent=len(records),
            ok=len(ok),
            failed=len(failed),
            failures=dict(Counter(str(record.failure) for record in failed).most_common()),
            short=sum(record.tokens < record.asked_output_tokens for record in ok),
            without_text=sum(not record.chunk_s for record in ok),
        ),
        messages={str(record.failure): record.message for record in reversed(failed)},
        ttft_ms=_ms([record.ttft_s for record in ok]),
        tpot_ms=_ms([record.tpot_s for record in ok]),
        itl_ms=_ms([gap for record in ok for gap in record.itl_s()]),
        e2e_ms=_ms([record.e2e_s for record in ok]),
        send_lag_ms=_ms([record.sent_s - record.start_s for record in records]),
        output_tokens=output,
        prompt_tokens=prompt,
        chunks=sum(len(record.chunk_s) for record in ok),
        output_tokens_per_s=_per_s(output, duration_s),
        prompt_tokens_per_s=_per_s(prompt, duration_s),
        requests_per_s=_per_s(len(ok), duration_s),
        cached_prompt_tokens=cached,
        cached_share=round(cached / max(1, sum(_prompt(record) for record in told)), 4) if cached is not None else None,
        slo=_goodput(slo, records, duration_s) if slo is not None else None,
        generator=generator,
    )


def _goodput(slo: Slo, records: Sequence[Record], duration_s: float) -> Goodput:
    good = [record for record in records if slo.met_by(record)]
    return Goodput(
        limits=slo,
        requests_share=round(len(good) / max(1, len(records)), 4),
        requests_per_s=_per_s(len(good), duration_s),
        output_tokens_per_s=_per_s(sum(record.tokens for record in good), duration_s),
    )


def _prompt(record: Record) -> int:
    return record.asked_prompt_tokens if record.prompt_tokens is None else record.prompt_tokens


def _ms(seconds: Sequence[float | None]) -> Distribution | None:
    return distribution([value * 1e3 for value in seconds if value is not None])


def _per_s(n: int, duration_s: float) -> float:
    return round(n / duration_s, 4) if duration_s > 0 else 0.0
