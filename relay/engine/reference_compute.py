"""The torch runner, loaded: what `relay.engine.start` needs of it. Imports torch, which takes seconds."""

from pathlib import Path

import torch

from relay.engine.reference_runner import ReferenceRunner
from relay.engine.roofline import StepCost, measure
from relay.engine.start import Compute
from relay.kv.memory import KVMemory
from relay.model.load import load
from relay.model.size import n_matrix_weights


def reference_compute(model_path: Path, memory: KVMemory, threads: int) -> Compute:
    """The torch runner. Raises ModelError."""
    torch.set_num_threads(threads)
    weights = load(model_path)
    spec, layout = weights.spec, memory.layout
    cost = StepCost(
        weight_bytes=4 * n_matrix_weights(spec),
        flops_per_row=2 * n_matrix_weights(spec),
        kv_token_bytes=layout.block_bytes // layout.block_tokens,
    )
    roofline = measure()
    return Compute(
        ReferenceRunner(memory, weights),
        lambda n_rows, n_kv_tokens: cost.floor_ns(roofline, n_rows, n_kv_tokens),
        lambda: torch.set_num_threads(threads),
        spec.max_context,
    )
