"""Random models on a section's device, as a worker loads them. Needs msgspec."""

import torch
from torch import Tensor

from relay.engine.cuda.pool import DevicePool
from relay.engine.cuda.programs import programs_for
from relay.engine.cuda.runner import CudaRunner
from relay.engine.cuda.step_limits import StepLimits
from relay.engine.cuda.weights import load_weights
from relay.gpu_check.stage import Stage
from relay.kernels.cuda_compiler import Program
from relay.kv.layout import KVLayout
from relay.model.checkpoint import Checkpoint
from relay.model.load import open_checkpoint
from relay.model.random_models import make_folder


def random_checkpoint(name: str) -> Checkpoint:
    from pathlib import Path

    return open_checkpoint(make_folder(name, Path.home() / ".cache" / "relayserve" / "random"))


def programs_of(checkpoint: Checkpoint) -> tuple[Program, ...]:
    return programs_for(checkpoint.spec, "bfloat16", frozenset(checkpoint.type(name) for name in checkpoint.names))


def runner_on(stage: Stage, checkpoint: Checkpoint, n_blocks: int, limits: StepLimits, *, graphs: bool = True) -> CudaRunner:
    """With a pool full of ordinary numbers, as if everything had been computed."""
    spec, runtime = checkpoint.spec, stage.runtime
    layout = KVLayout(
        n_layers=spec.n_layers,
        n_kv_heads=spec.n_kv_heads,
        head_dim=spec.head_dim,
        block_tokens=16,
        dtype="bfloat16",
        n_blocks=n_blocks,
    )
    pool = DevicePool.create(layout, runtime, 1)
    with runtime.computing():
        for side in (*pool.keys, *pool.values):
            _fill(side)
        runtime.finish()
    weights = load_weights(checkpoint, torch.bfloat16, runtime, max_rows=limits.max_rows, max_context=limits.max_context)
    return CudaRunner(pool, weights, runtime, limits, graphs=graphs, keep_logits=True)


def _fill(side: Tensor) -> None:
    side.normal_()
