"""Tiny models on an emulated device, with heads of a width that the kernels have."""

import functools

import torch

from relay.engine.cuda.pool import DevicePool
from relay.engine.cuda.programs import programs_for
from relay.engine.cuda.runner import CudaRunner
from relay.engine.cuda.step_limits import StepLimits
from relay.engine.cuda.weights import load_weights
from relay.kernels.emulator.runtime import EmulatedRuntime
from relay.kv.layout import KVLayout
from relay.model.checkpoint import Checkpoint
from relay.model.spec import ModelSpec
from tests.engine.native_models import checkpoint_of, variant

SMALL = variant(hidden=64, n_heads=2, n_kv_heads=1, head_dim=64, ffn=96, vocab_size=320, max_context=512)
LIMITS = StepLimits(max_running=4, max_chunk_tokens=128, max_context=512)


@functools.cache
def runtime_for(head_dim: int, formats: frozenset[str] = frozenset()) -> EmulatedRuntime:
    return EmulatedRuntime(programs_for(variant(head_dim=head_dim), "bfloat16", formats))


@functools.cache
def checkpoint(kinds: str | tuple[str, ...] = "BF16", spec: ModelSpec = SMALL) -> Checkpoint:
    return checkpoint_of(spec, kinds)


def device_layout(spec: ModelSpec, n_blocks: int) -> KVLayout:
    return KVLayout(
        n_layers=spec.n_layers,
        n_kv_heads=spec.n_kv_heads,
        head_dim=spec.head_dim,
        block_tokens=16,
        dtype="bfloat16",
        n_blocks=n_blocks,
    )


def runner_on(
    source: Checkpoint,
    runtime: EmulatedRuntime,
    n_blocks: int = 60,
    *,
    graphs: bool = True,
    exact: bool = True,
    torch_attention: bool = False,
) -> CudaRunner:
    pool = DevicePool.create(device_layout(source.spec, n_blocks), runtime, epoch=1)
    weights = load_weights(source, torch.bfloat16, runtime, max_rows=LIMITS.max_rows, max_context=LIMITS.max_context, exact=exact)
    return CudaRunner(pool, weights, runtime, LIMITS, graphs=graphs, keep_logits=True, torch_attention=torch_attention)
