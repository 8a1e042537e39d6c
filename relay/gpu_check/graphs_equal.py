"""Section `graphs`: a replayed step has the bits of one that was launched, and of the same rows in a chunk; other rows leave no trace."""

from collections.abc import Sequence

import numpy as np

from relay.engine.cuda.step_limits import StepLimits
from relay.engine.runner import Batch, Runner
from relay.gpu_check.batches import decoding, prompt
from relay.gpu_check.models import programs_of, random_checkpoint, runner_on
from relay.gpu_check.report import Found
from relay.gpu_check.stage import Stage


def run(found: Found, rehearse: bool) -> None:
    checkpoint = random_checkpoint("tiny-llama-64" if rehearse else "smollm2-135m")
    stage = Stage(programs_of(checkpoint), rehearse=rehearse)
    context = stage.size(1000, 40)
    limits = StepLimits(stage.size(64, 4), stage.size(512, 64), stage.size(2048, 128))
    graphed = runner_on(stage, checkpoint, stage.size(4200, 40), limits)
    eager = runner_on(stage, checkpoint, stage.size(4200, 40), limits, graphs=False)
    with stage.runtime.computing():  # where the steps are, and behind what filled the pool
        eager.memory.words.copy_(graphed.memory.words)
        stage.runtime.finish()
    compare(found, graphed, eager, (1, 3) if rehearse else (1, 2, 7, 16, 33, 64), context)
    n = stage.size(300, 40)
    by_chunk = graphed.step(prompt(n)).logits
    graphed.step(_without_draws(prompt(n - 1)))
    by_row = graphed.step(prompt(n, n - 1)).logits
    assert by_chunk is not None
    assert by_row is not None
    found.holds("a prompt's last row as part of a chunk, and decoded", _same(by_chunk, by_row))
    found.holds("graphs were replayed", sum(graphed.graphs.n_replays.values()) > 0, f"{sum(graphed.graphs.n_replays.values())} times")


def compare(found: Found, graphed: Runner, eager: Runner, counts: Sequence[int], context: int) -> None:
    """Decode steps of ever more sequences, the former among them, on pools of equal content."""
    before = None
    for n in counts:
        one, other = graphed.step(decoding(n, context)).logits, eager.step(decoding(n, context)).logits
        assert one is not None
        assert other is not None
        finite = bool(np.isfinite(one).all())
        found.holds(f"{n} sequences: the graph's logits are the launched step's", finite and _same(one, other), "" if finite else "NaN")
        if before is not None:
            found.holds(f"{n} sequences: the rows of {len(before)} have their bits", _same(one[: len(before)], before))
        before = one


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and bool((a.view(np.int32) == b.view(np.int32)).all())


def _without_draws(batch: Batch) -> Batch:
    return Batch(batch.tokens, batch.positions, batch.sequence, batch.block_table, np.empty(0, np.int32), ())
