"""The least time physics allows for a step on this machine: bytes over bandwidth, or operations over rate, whichever is more.

Both are measured once at start with the same number of threads as the engine has. What a step takes beyond its floor is excess.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import torch


class Roofline(msgspec.Struct, frozen=True, kw_only=True):
    """bytes_per_s: reading memory. flops_per_s: multiply and add of float32, counted as two."""

    bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True, slots=True)
class StepCost:
    """What a step must move and compute: weights once, per row its operations, per row and KV token the KV bytes."""

    weight_bytes: int
    flops_per_row: int
    kv_token_bytes: int

    def floor_ns(self, roofline: Roofline, n_rows: int, n_kv_tokens: int) -> int:
        """Nanoseconds at least for `n_rows` rows that attend to `n_kv_tokens` tokens in all."""
        moving = (self.weight_bytes + self.kv_token_bytes * n_kv_tokens) / roofline.bytes_per_s
        computing = self.flops_per_row * n_rows / roofline.flops_per_s
        return int(1e9 * max(moving, computing))


def measure() -> Roofline:
    """Takes about 0.2 s. The best of a few runs: a floor is what is possible, not what is usual."""
    data = torch.ones(64 << 20, dtype=torch.float32)
    a, b = torch.ones(256, 1024), torch.ones(1024, 1024)
    return Roofline(
        bytes_per_s=data.numel() * 4 / _best(lambda: data.sum(), 3),
        flops_per_s=2 * 256 * 1024 * 1024 / _best(lambda: a @ b, 5),
    )


def _best(run: Callable[[], object], times: int) -> float:
    best = float("inf")
    for _ in range(times):
        started = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - started)
    return best
