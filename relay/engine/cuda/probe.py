"""What a device gives at most, measured at start: bytes moved and operations done a second.

Nothing is allocated for it: until the first request nobody holds a block, so the KV pool's own memory is what is copied and multiplied, and
is zeros again after that. A pool smaller than what is probed with gives less; then caches may help, and figures are those of caches.
"""

import time
from collections.abc import Callable
from typing import Final

import torch

from relay.engine.cuda.pool import DevicePool
from relay.kernels.device_runtime import Runtime

_COPIED_BYTES: Final = 256 << 20  # more than caches hold
_WIDTH: Final = 8192  # of the matrices
_ALIGNED: Final = 256
_COPIES, _PRODUCTS, _TRIES = 8, 2, 5  # launched at once, so that waiting for them is a small part


def copy_rate(memory: DevicePool, runtime: Runtime) -> float:
    """Bytes read and written a second."""
    room = memory.words.view(-1).view(torch.uint8)
    n = min(_COPIED_BYTES, len(room) // 2 // _ALIGNED * _ALIGNED)
    source, target = room[:n], room[n : 2 * n]
    return 2 * n * _COPIES / _best(runtime, lambda: target.copy_(source), _COPIES)


def product_rate(memory: DevicePool, runtime: Runtime) -> float:
    """Operations a second of torch's own product in bfloat16; two for each product and sum."""
    room = memory.words.view(-1).view(torch.bfloat16)
    width = next(n for n in (_WIDTH >> i for i in range(_WIDTH.bit_length())) if 2 * n * n <= len(room))
    a, product = room[: width**2].view(width, width), room[width**2 : 2 * width**2].view(width, width)
    with runtime.computing():
        a.normal_()  # of zeros a device makes more
    rate = 2 * width**3 * _PRODUCTS / _best(runtime, lambda: torch.mm(a, a, out=product), _PRODUCTS)
    with runtime.computing():
        room[: 2 * width**2].zero_()
        runtime.finish()
    return rate


def _best(runtime: Runtime, run: Callable[[], object], times: int) -> float:
    """Seconds of `times` runs."""
    best = float("inf")
    with runtime.computing():
        for _ in range(_TRIES):
            runtime.finish()
            started = time.perf_counter()
            for _ in range(times):
                run()
            runtime.finish()
            best = min(best, time.perf_counter() - started)
    return best
