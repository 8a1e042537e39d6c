"""The runner on a device, loaded: what `relay.engine.start` needs of it. Imports torch, which takes seconds."""

from functools import partial
from pathlib import Path

import structlog

from relay.engine.cuda.memory_plan import weight_bytes
from relay.engine.cuda.pool import TYPES, DevicePool
from relay.engine.cuda.probe import copy_rate, product_rate
from relay.engine.cuda.programs import programs_for
from relay.engine.cuda.runner import CudaRunner
from relay.engine.cuda.step_limits import StepLimits
from relay.engine.cuda.warm_up import warm_up
from relay.engine.cuda.weights import load_weights
from relay.engine.measured import Measured
from relay.engine.roofline import Roofline, StepCost
from relay.engine.start import Compute
from relay.kernels.device_runtime import CudaRuntime, HandleRefused, Runtime
from relay.kernels.emulator.runtime import EmulatedRuntime
from relay.kv.layout import KVLayout
from relay.kv.pool import KVPool
from relay.kv.pools import Map
from relay.messages import Address, PoolHandle
from relay.model.load import open_checkpoint
from relay.model.size import n_matrix_weights

_FORBIDDEN = (
    "if that worker has just ended, nothing needs to be done; if it runs, this machine forbids CUDA's memory handles between processes: "
    "start the container with --ipc=host, leave WSL, or give one worker both roles (roles: [prefill, decode]), which needs no handle"
)


def open_device(model_path: Path, dtype: str, gpu: int | None, *, peer_access: bool) -> Runtime:
    """With every kernel of this model's steps built and loaded. gpu: its number; None: the emulator. Raises StartError."""
    checkpoint = open_checkpoint(model_path)
    programs = programs_for(checkpoint.spec, dtype, frozenset(checkpoint.type(name) for name in checkpoint.names))
    runtime: Runtime = EmulatedRuntime(programs, peer_access=peer_access) if gpu is None else CudaRuntime(gpu, peer_access=peer_access)
    runtime.load(programs)
    return runtime


def device_pools(layout: KVLayout, runtime: Runtime) -> Map:
    """Pools of other lives, by the handle that comes with each lease. Why one cannot be had is logged, each reason once."""
    known: set[str] = set()

    def map_pool(address: Address, handle: PoolHandle | None) -> KVPool | None:
        if handle is None:
            return None
        try:
            return DevicePool.open(layout, runtime, handle)
        except HandleRefused as error:
            if str(error) not in known:
                known.add(str(error))
                structlog.get_logger().warning("a KV pool cannot be opened", of=str(address), reason=str(error), what_to_do=_FORBIDDEN)
            return None

    return map_pool


def cuda_compute(
    model_path: Path, memory: DevicePool, runtime: Runtime, limits: StepLimits, measured: Measured, *, exact: bool, torch_attention: bool
) -> Compute:
    """The runner with its weights loaded, its graphs captured, and everything launched once. Raises ModelError."""
    checkpoint = open_checkpoint(model_path)
    layout = memory.layout
    weights = load_weights(checkpoint, TYPES[layout.dtype], runtime, max_rows=limits.max_rows, max_context=limits.max_context, exact=exact)
    with runtime.alone():
        runner = CudaRunner(memory, weights, runtime, limits, torch_attention=torch_attention)
        exact = weights.exact and not torch_attention
        warm_up(runner, runtime, limits)
        if runtime.place.type != "cuda":
            return Compute(runner, _no_floor, runtime.enter_thread, limits.max_context, exact, runtime.alone)
        roofline = Roofline(
            bytes_per_s=measured.value("device_bytes_per_s", lambda: copy_rate(memory, runtime)),
            flops_per_s=measured.value("device_flops_per_s", lambda: product_rate(memory, runtime)),
        )
    cost = StepCost(
        weight_bytes=weight_bytes(checkpoint),
        flops_per_row=2 * n_matrix_weights(checkpoint.spec),
        kv_token_bytes=layout.block_bytes // layout.block_tokens,
    )
    return Compute(runner, partial(cost.floor_ns, roofline), runtime.enter_thread, limits.max_context, exact, runtime.alone)


def _no_floor(n_rows: int, n_kv_tokens: int) -> int:
    """An emulated device has no least time."""
    return 0
