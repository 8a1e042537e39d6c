"""What sections stand on: a runtime, sizes, random numbers, and time.

Rehearsed, everything is tiny and the device emulated: the same code runs to its end, and its figures say nothing of any speed.
"""

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from relay.kernels.cuda_compiler import Program
from relay.kernels.device_runtime import CudaRuntime, Runtime
from relay.kernels.emulator.runtime import EmulatedRuntime

_REPLAYS = 5


class Stage:
    """programs: what the section launches."""

    def __init__(self, programs: Sequence[Program], *, rehearse: bool) -> None:
        self.rehearse = rehearse
        self.runtime: Runtime = EmulatedRuntime(programs) if rehearse else CudaRuntime(0)
        self.on, self.place = self.runtime.on, self.runtime.place
        self._generator = torch.Generator(device=self.place).manual_seed(1)

    def size(self, real: int, small: int) -> int:
        return small if self.rehearse else real

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
        """Made on the computing stream, which alone may use it without waiting."""
        with self.runtime.computing():
            numbers = torch.randn(*shape, generator=self._generator, device=self.place)
            return numbers.mul_(scale).to(dtype)

    def seconds(self, runs: Sequence[Callable[[], None]], repeats: int = 1) -> float:
        """Of one run on average, in a graph that goes through all of them `repeats` times; the median of some replays.

        Several runs on data of their own keep the caches from helping.
        """
        with self.runtime.computing():
            for run in runs:
                run()
            self.runtime.finish()
            n = 1 if self.rehearse else repeats

            def all_of_them() -> None:
                for _ in range(n):
                    for run in runs:
                        run()

            graph = self.runtime.capture(all_of_them)
            times = []
            for _ in range(1 if self.rehearse else _REPLAYS + 2):
                self.runtime.finish()
                started = time.perf_counter()
                graph.replay()
                self.runtime.finish()
                times.append(time.perf_counter() - started)
        best = sorted(times[-_REPLAYS:])
        return best[len(best) // 2] / (n * len(runs))

    def torch_seconds(self, run: Callable[[], object], repeats: int = 10) -> float:
        """Of something of torch's own, launched one by one."""
        n = 1 if self.rehearse else repeats
        times = []
        with self.runtime.computing():
            for _ in range(3):
                self.runtime.finish()
                started = time.perf_counter()
                for _ in range(n):
                    run()
                self.runtime.finish()
                times.append(time.perf_counter() - started)
        return min(times) / n

    def copy_rate(self) -> float:
        """Bytes read and written a second: the most that memory gives."""
        n = self.size(4 << 30, 1 << 20)
        with self.runtime.computing():
            source, target = (torch.empty(n, dtype=torch.uint8, device=self.place).random_(generator=self._generator) for _ in range(2))
        return 2 * n / self.torch_seconds(lambda: target.copy_(source))

    def product_rate(self) -> float:
        """bfloat16 operations a second of torch's own product."""
        n = self.size(8192, 64)
        a, b = self.normal(n, n), self.normal(n, n)
        return 2 * n**3 / self.torch_seconds(lambda: a @ b)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal also where NaN, and 0 is not -0."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def relative_error(got: Tensor, want: Tensor) -> float:
    """In the Euclidean norm; NaN where something is NaN."""
    return float((got.double().cpu() - want.cpu()).norm() / want.norm().cpu().clamp_min(1e-30))
