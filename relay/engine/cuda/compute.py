"""The runner on a device, loaded: what `relay.engine.start` needs of it. Imports torch, which takes seconds."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from relay.engine.cuda.memory_plan import weight_bytes
from relay.engine.cuda.pool import TYPES, DevicePool
from relay.engine.cuda.programs import programs_for
from relay.engine.cuda.runner import CudaRunner
from relay.engine.cuda.step_limits import StepLimits
from relay.engine.cuda.weights import load_weights
from relay.engine.measured import Measured
from relay.engine.roofline import Roofline, StepCost
from relay.engine.start import Compute
from relay.kernels.device_runtime import CudaRuntime, Runtime
from relay.kernels.emulator.runtime import EmulatedRuntime
from relay.kv.layout import KVLayout
from relay.kv.pool import KVPool
from relay.kv.pools import Map
from relay.messages import Address, PoolHandle
from relay.model.load import open_checkpoint
from relay.model.size import n_matrix_weights

_PROBE_BYTES = 1 << 30
_PROBE_WIDTH = 8192


def open_device(model_path: Path, dtype: str, gpu: int | None, *, peer_access: bool) -> Runtime:
    """gpu: its number; None: the emulator, which compiles each kernel when it is first launched. Raises StartError."""
    if gpu is not None:
        return CudaRuntime(gpu, peer_access=peer_access)
    checkpoint = open_checkpoint(model_path)
    types = frozenset(checkpoint.type(name) for name in checkpoint.names)
    return EmulatedRuntime(programs_for(checkpoint.spec, dtype, types), peer_access=peer_access)


def device_pools(layout: KVLayout, runtime: Runtime) -> Map:
    """Pools of other lives, by the handle that comes with each lease."""

    def map_pool(address: Address, handle: PoolHandle | None) -> KVPool | None:
        return None if handle is None else DevicePool.open(layout, runtime, handle)

    return map_pool


def cuda_compute(model_path: Path, memory: DevicePool, runtime: Runtime, limits: StepLimits, measured: Measured, *, exact: bool) -> Compute:
    """The runner with its weights loaded and its graphs captured. Raises ModelError."""
    checkpoint = open_checkpoint(model_path)
    layout = memory.layout
    weights = load_weights(checkpoint, TYPES[layout.dtype], runtime, max_rows=limits.max_rows, max_context=limits.max_context, exact=exact)
    runner = CudaRunner(memory, weights, runtime, limits)
    if runtime.place.type != "cuda":
        return Compute(runner, _no_floor, runtime.enter_thread, limits.max_context, weights.exact)
    cost = StepCost(
        weight_bytes=weight_bytes(checkpoint),
        flops_per_row=2 * n_matrix_weights(checkpoint.spec),
        kv_token_bytes=layout.block_bytes // layout.block_tokens,
    )
    roofline = Roofline(
        bytes_per_s=measured.value("device_bytes_per_s", lambda: _copy_rate(runtime)),
        flops_per_s=measured.value("device_flops_per_s", lambda: _product_rate(runtime)),
    )
    return Compute(runner, partial(cost.floor_ns, roofline), runtime.enter_thread, limits.max_context, weights.exact)


def _no_floor(n_rows: int, n_kv_tokens: int) -> int:
    """An emulated device has no least time."""
    return 0


def _copy_rate(runtime: Runtime) -> float:
    """Bytes read and written a second."""
    source = torch.zeros(_PROBE_BYTES, dtype=torch.uint8, device=runtime.place)
    target = torch.empty_like(source)
    return 2 * _PROBE_BYTES / _best(runtime, lambda: target.copy_(source))


def _product_rate(runtime: Runtime) -> float:
    """Operations a second; two for each product and sum."""
    a = torch.randn(_PROBE_WIDTH, _PROBE_WIDTH, device=runtime.place).bfloat16()
    return 2 * _PROBE_WIDTH**3 / _best(runtime, lambda: a @ a)


def _best(runtime: Runtime, run: Callable[[], object]) -> float:
    best = float("inf")
    with runtime.computing():
        for _ in range(5):
            runtime.finish()
            started = time.perf_counter()
            run()
            runtime.finish()
            best = min(best, time.perf_counter() - started)
    return best
