"""Section `graphs`, its claim of rows that keep their bits: a runner whose rows depend on how many they are is found out."""

import dataclasses

import numpy as np

from relay.engine.cuda.runner import CudaRunner
from relay.engine.cuda.step_limits import StepLimits
from relay.engine.runner import Batch, StepResult
from relay.gpu_check.graphs_equal import compare
from relay.gpu_check.models import programs_of, random_checkpoint, runner_on
from relay.gpu_check.report import Found
from relay.gpu_check.stage import Stage


class Crowded:
    """A runner whose logits are moved by one unit in the last place if there is more than one sequence."""

    def __init__(self, runner: CudaRunner) -> None:
        self._runner = runner
        self.vocab_size, self.tile_rows, self.keep_logits = runner.vocab_size, runner.tile_rows, runner.keep_logits
        self.memory, self.layout = runner.memory, runner.layout

    def step(self, batch: Batch) -> StepResult:
        result = self._runner.step(batch)
        assert result.logits is not None
        if len(batch.draws) == 1:
            return result
        return dataclasses.replace(result, logits=np.nextafter(result.logits, np.float32(np.inf)))


def test_rows_that_depend_on_how_many_they_are_fail_the_section() -> None:
    checkpoint = random_checkpoint("tiny-llama-64")
    stage = Stage(programs_of(checkpoint), rehearse=True)
    runner = runner_on(stage, checkpoint, 6, StepLimits(2, 32, 64), graphs=False)
    right, wrong = Found("graphs"), Found("graphs")
    compare(right, runner, runner, (1, 2), 40)
    compare(wrong, Crowded(runner), Crowded(runner), (1, 2), 40)
    assert [row.name for row in right.rows if row.ok is False] == []
    assert [row.name for row in wrong.rows if row.ok is False] == ["2 sequences: the rows of 1 have their bits"]
    assert wrong.close().status == "failed"
