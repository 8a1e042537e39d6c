"""What a prefill or decode worker counts."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from relay.engine.report import StepReport
from relay.kv.book import BlockCounts
from relay.ledger.metrics import TOKEN_SECONDS


class EngineMetrics:
    """What a prefill or decode worker does."""

    def __init__(self) -> None:
        self.registry = r = CollectorRegistry()
        self.steps = Counter("relay_steps", "Engine steps", registry=r)
        self.step_seconds = Histogram("relay_step_seconds", "Length of a step", buckets=TOKEN_SECONDS, registry=r)
        self.prefill_tokens = Counter("relay_prefill_tokens_computed", "Prompt tokens computed", registry=r)
        self.decode_rows = Counter("relay_decode_rows_computed", "Tokens generated", registry=r)
        self.drafted = Counter("relay_draft_tokens", "Tokens guessed and computed on trial", registry=r)
        self.accepted = Counter("relay_draft_tokens_accepted", "Guessed tokens that came", registry=r)
        self.preemptions = Counter("relay_preemptions", "Sequences that lost their blocks", registry=r)
        self.running = Gauge("relay_sequences_running", "In the decode batch", registry=r)
        self.waiting = Gauge("relay_sequences_waiting", "Prompts being computed or waiting for it", registry=r)
        self.log_bytes = Gauge("relay_resumable_log_bytes", "Remembered of resumable streams", registry=r)
        self.blocks = Gauge("relay_kv_blocks", "Blocks of the KV pool", ["state"], registry=r)

    def on_report(self, report: StepReport) -> None:
        self.preemptions.inc(report.n_preempted)
        if report.n_prefill_tokens or report.n_decode_rows:
            self.steps.inc()
            self.step_seconds.observe((report.ended_ns - report.began_ns) / 1e9)
            self.prefill_tokens.inc(report.n_prefill_tokens)
            self.decode_rows.inc(report.n_decode_rows + report.n_accepted)
            self.drafted.inc(report.n_drafted)
            self.accepted.inc(report.n_accepted)

    def blocks_now(self, counts: BlockCounts) -> None:
        for state in ("free", "cached", "leased", "running", "quarantined"):
            self.blocks.labels(state=state).set(getattr(counts, state))
