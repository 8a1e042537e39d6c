"""Section `decode`: steps of an 8B model in bfloat16, random weights: the device's time, the whole step's, and what physics allows."""

import statistics
import time
from collections.abc import Callable
from functools import partial

from relay.engine.cuda.memory_plan import weight_bytes
from relay.engine.cuda.step_limits import StepLimits
from relay.gpu_check.batches import decoding, prompt
from relay.gpu_check.models import programs_of, random_checkpoint, runner_on
from relay.gpu_check.report import Found
from relay.gpu_check.stage import Stage
from relay.model.size import n_matrix_weights

TARGET = 0.65  # of the bandwidth roofline, at batch 1


def run(found: Found, rehearse: bool) -> None:
    checkpoint = random_checkpoint("tiny-llama-64" if rehearse else "llama-3-8b")
    stage = Stage(programs_of(checkpoint), rehearse=rehearse)
    copy, product = stage.copy_rate(), stage.product_rate()
    context, chunk = stage.size(1000, 40), stage.size(2048, 64)
    limits = StepLimits(stage.size(64, 2), chunk, stage.size(4096, 128))
    started = time.monotonic()
    runner = runner_on(stage, checkpoint, stage.size(4200, 40), limits)
    runner.keep_logits = False
    found.time("weights made and loaded, graphs captured", time.monotonic() - started, "s")
    spec = checkpoint.spec
    per_token = 2 * 2 * spec.n_layers * spec.n_kv_heads * spec.head_dim
    read = weight_bytes(checkpoint) - 2 * spec.vocab_size * spec.hidden  # of the embedding a step reads a few rows
    for n in (1, 2) if rehearse else (1, 16, 64):
        least = 1e3 * (read + n * context * per_token) / copy
        batch = decoding(n, context)
        bucket = runner.graphs.bucket_for(n, context)
        assert bucket is not None
        step = partial(runner.step, batch)
        whole = 1e3 * _median(step, stage.size(20, 2))
        replay = 1e3 * _median(partial(runner.replay, bucket), stage.size(20, 2))  # of what the steps have loaded
        found.time(f"decode, {n} x {context}: the graph", replay, "ms", least=least, share=TARGET if n == 1 else None)
        found.time(f"decode, {n} x {context}: the step", whole, "ms", least=least, note=f"{n / whole * 1e3:.0f} tokens/s")
        if n in (1, 64):
            runner.graphs.enabled = False
            launched = 1e3 * _median(step, stage.size(10, 2))
            runner.graphs.enabled = True
            found.time(f"decode, {n} x {context}: launched one by one", launched, "ms", least=least)
    seconds = _median(partial(runner.step, prompt(chunk)), stage.size(5, 1))
    most = product / (2 * n_matrix_weights(spec))
    note = "the runner alone: no scheduling, no push"
    found.rate(f"prefill, a chunk of {chunk}", chunk / seconds, "tokens/s", most=most, note=note)


def _median(run: Callable[[], object], times: int) -> float:
    run()
    found = []
    for _ in range(times):
        started = time.perf_counter()
        run()
        found.append(time.perf_counter() - started)
    return statistics.median(found)
