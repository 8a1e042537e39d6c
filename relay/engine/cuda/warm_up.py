"""Everything that a request can launch, launched once before there is one: kernels and torch's operations are loaded when they first run.

At every start, also where a worker's earlier life has measured what its steps cost. Nobody holds a block yet, so any may be written.
"""

from typing import Final

import numpy as np

from relay.engine.cuda.runner import CudaRunner
from relay.engine.cuda.step_limits import StepLimits
from relay.engine.runner import Batch, Draw, Push
from relay.kernels.device_runtime import Runtime
from relay.messages import Sampling

_N_ROWS: Final = (1, 2, 9, 33, 65)  # one of each shape that a product's tiles have, and a chunk
_DRAWS: Final = (
    Sampling(temperature=0.0),
    Sampling(temperature=0.8, top_p=0.9, top_k=20, seed=1, logprobs=2),
    Sampling(temperature=0.9, min_p=0.1, repetition_penalty=1.1, frequency_penalty=0.1, presence_penalty=0.1, logit_bias=((0, 1.0),)),
)


def warm_up(runner: CudaRunner, runtime: Runtime, limits: StepLimits) -> None:
    """Every graph, steps of a row and of chunks, every way of drawing, a push of a block, and a pool's own sums and copies."""
    memory, layout = runner.memory, runner.layout
    room = min(limits.max_rows, limits.max_context, layout.n_blocks * layout.block_tokens)
    last = np.asarray([layout.n_blocks - 1], np.int32)
    push = Push(memory, np.zeros(1, np.int32), last)
    for bucket in runner.graphs.buckets():  # first, while its inputs are padding
        runner.replay(bucket)
    for n_rows in (n for n in _N_ROWS if n <= room):
        for sampling in _DRAWS if n_rows == 1 else _DRAWS[:1]:
            runner.step(_prompt(runner, n_rows, sampling))
    runner.step(_prompt(runner, min(2, room), _DRAWS[0], push))
    memory.copy_block(0, layout.n_blocks - 1)
    memory.checksums(last)
    runtime.finish()


def _prompt(runner: CudaRunner, n_rows: int, sampling: Sampling, *pushes: Push) -> Batch:
    """Of one sequence, whose last row is drawn; in a graph where it has no other and there are no pushes."""
    return Batch(
        tokens=np.zeros(n_rows, np.int32),
        positions=np.arange(n_rows, dtype=np.int32),
        sequence=np.zeros(n_rows, np.int32),
        block_table=np.arange(-(-n_rows // runner.layout.block_tokens), dtype=np.int32)[None],
        logit_rows=np.asarray([n_rows - 1], np.int32),
        draws=(Draw(sampling, 0.0, [0] * n_rows, n_rows),),
        pushes=pushes,
    )
