"""What launches the kernels of this room's .cu files: on the GPU through CuPy, and on the emulator, by the same call.

    CUDA.launch(Launch(program, "paged_decode"), grid, block, arguments, shared)

This and `cuda_devices` alone import CuPy. A program is loaded from its cubin, which is built once and kept (`cuda_compiler.build`); where
there is no NVRTC package, or none of our architectures suits the device, CuPy's own NVRTC compiles it. A launch goes to torch's current
stream, allocates nothing and waits for nothing; the first one of a kernel loads it unless `load` has, so it must come before a graph is
captured. Under capture scalars are baked in; what changes between replays lies in device tensors. A launch goes to torch's current device.
"""

import functools
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import torch
from torch import Tensor

from relay.errors import KernelsUnavailable
from relay.kernels.cuda_compiler import Program, architecture_for, build, build_all, kernels_of

Argument = Tensor | np.generic | None
Grid = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel of a program."""

    program: Program
    kernel: str


class Device(Protocol):
    """Where kernels run."""

    @property
    def type(self) -> str:
        """Of the torch tensors that it takes."""
        ...

    def launch(self, what: Launch, grid: Grid, block: int, arguments: Sequence[Argument], shared: int = 0) -> None:
        """arguments: tensors (by address; None is null) and numpy scalars of the kernel's types. shared: bytes of dynamic memory."""
        ...


class CudaDevice:
    """The GPU of this process, or for a while another (`Runtime.on_peer`)."""

    def __init__(self) -> None:
        self._functions: dict[tuple[Launch, int, int], Any] = {}
        self._streams: dict[tuple[int, int], Any] = {}

    @property
    def type(self) -> str:
        return "cuda"

    def launch(self, what: Launch, grid: Grid, block: int, arguments: Sequence[Argument], shared: int = 0) -> None:
        """Raises KernelsUnavailable where there is no CuPy or no device for it."""
        number = torch.cuda.current_device()
        function = self._functions.get((what, shared, number))
        if function is None:
            function = self._functions[what, shared, number] = _load(what, shared, number)
        current = _Stream(torch.cuda.current_stream().cuda_stream)
        stream = self._streams.get((number, current.address))
        if stream is None:
            stream = self._streams[number, current.address] = load_cupy().cuda.Stream.from_external(current)
        with stream:
            function(grid, (block, 1, 1), tuple(_packed(a) for a in arguments), shared_mem=shared)


@dataclass(frozen=True, slots=True)
class _Stream:
    """A stream of torch's, which lives as long as the process, as CuPy takes it from anybody."""

    address: int

    def __cuda_stream__(self) -> tuple[int, int]:
        """Version and address: the CUDA stream protocol, nvidia.github.io/cuda-python."""
        return (0, self.address)


def _packed(argument: Argument) -> np.generic:
    if isinstance(argument, Tensor):
        return np.uint64(argument.data_ptr())
    return np.uint64(0) if argument is None else argument


@functools.cache
def load_cupy() -> Any:
    """Raises KernelsUnavailable where there is no CuPy or no device for it."""
    try:
        import cupy

        cupy.cuda.Device().compute_capability  # noqa: B018  raises where there is no device
    except Exception as error:  # CuPy's own, ImportError, or of a library that is not there
        raise KernelsUnavailable(f"the CUDA kernels need CuPy and an NVIDIA GPU; CuPy says: {error}") from error
    return cupy


def load(programs: Sequence[Program]) -> None:
    """All kernels of these, for torch's current device: no launch waits for a compiler after that. What is not built yet is, several at a
    time. Raises KernelsUnavailable where there is no CuPy or no device for it."""
    number, architecture = torch.cuda.current_device(), _architecture()
    if architecture is not None:
        with suppress(KernelsUnavailable):  # as in `_module`, which goes on from there
            build_all((program, architecture) for program in programs)
    for program in programs:
        module = _module(program, number)
        for kernel in kernels_of(program.path):
            module.get_function(kernel)


def _architecture() -> int | None:
    """Of cubins for the current device; None: it runs none of ours."""
    capability = load_cupy().cuda.Device().compute_capability
    return architecture_for(int(capability[:-1]), int(capability[-1]))


@functools.cache
def _module(program: Program, number: int) -> Any:
    """number: of the current device, each of which loads its own."""
    cupy, architecture = load_cupy(), _architecture()
    if architecture is not None:
        with suppress(KernelsUnavailable):  # there is no NVRTC package; if the source is wrong, CuPy's says so
            return cupy.RawModule(path=str(build(program, architecture)))
    options = tuple(flag for flag in program.flags if flag != "-ftz=true")  # CuPy adds this one itself, and twice may be once too often
    return cupy.RawModule(code=program.path.read_text(), options=options, backend="nvrtc")


def _load(what: Launch, shared: int, number: int) -> Any:
    function = _module(what.program, number).get_function(what.kernel)
    if shared > 48 * 1024:
        function.max_dynamic_shared_size_bytes = shared
    return function


CUDA: Final[Device] = CudaDevice()
