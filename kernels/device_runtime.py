"""What a runner needs of a device beside its kernels: streams, graphs, plain memory, and other processes' memory.

`CudaRuntime` is the GPU of this process; `relay.kernels.emulator.runtime` plays one on the CPU. Two streams: steps are computed on one, and
copies into other pools go on the other, behind what was launched before them. Memory that others may map is plain cudaMalloc, outside of
torch's and CuPy's pools. A handle is 64 bytes and names a whole allocation, from its first byte on; it carries no order and no right.

What lies on a device that this one does not reach is opened there, by a second context of this process: only launches `on_peer` touch it,
and what is to get there passes through `pinned` memory of the host, which the kernels of every device read and write.

Rules of CUDA's IPC, which both keep: a handle cannot be opened in the process that made it; opened again it gives the same mapping; after
the maker's death or `free` it opens no more, and what is still mapped is garbage.

torch makes tensors on a stream of its own, and none of ours waits for that one: whoever makes some outside of `computing` calls `settle`
before something is launched that reads them.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import torch
from torch import Tensor

from relay.errors import KernelsUnavailable
from relay.kernels import cuda_library
from relay.kernels.cpp_library import locked
from relay.kernels.cuda_compiler import Program, cache_folder
from relay.kernels.cuda_devices import refuse_expandable_segments
from relay.kernels.cuda_library import CUDA, Device, load_cupy

HANDLE_BYTES: Final = 64
_GRANULE: Final = 2 << 20  # of device memory


class HandleRefused(RuntimeError):
    """A handle that opens nothing: its maker has ended or freed what it names, or this machine forbids it. Says what the device said."""


class Graph(Protocol):
    """Launches that were captured. Addresses and scalars are what they were then."""

    def replay(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Memory:
    """base: uint8 [n_bytes], an allocation of ours, or a mapping of somebody else's. `release`: free it, or close the mapping; once."""

    base: Tensor
    release: Callable[[], None]


class Runtime(Protocol):
    """Used by the thread that computes; `allocate`, `handle_of` and `open` by the one that loads, too."""

    on: Device
    place: torch.device
    number: int  # as nvidia-smi counts

    def enter_thread(self) -> None:
        """First call on each thread that uses the device."""
        ...

    def load(self, programs: Sequence[Program]) -> None:
        """Build what is not built yet, and load it all: no launch waits for a compiler after that. Raises KernelsUnavailable."""
        ...

    def settle(self) -> None:
        """Wait for what was made outside of `computing` and `copying`, so that launches may read it."""
        ...

    def alone(self) -> AbstractContextManager[None]:
        """Inside, nobody else on this machine is inside for the same device: two that measure at once each see half of it."""
        ...

    def computing(self) -> AbstractContextManager[None]:
        """Launches and torch's operations inside go to the computing stream."""
        ...

    def copying(self, *, behind_peers: bool = False) -> AbstractContextManager[None]:
        """Inside to the copy stream, behind everything that is on the computing one; and behind what is on those of other devices."""
        ...

    def on_peer(self, number: int) -> AbstractContextManager[None]:
        """Inside to a stream of that device, which this one does not reach, behind everything that is on the copy stream."""
        ...

    def reaches(self, number: int) -> bool:
        """Whether what runs here may touch the memory of that device: its own, or by NVLink or PCIe."""
        ...

    def call(self, run: Callable[[], object]) -> None:
        """A torch operation on fixed tensors, in order with launches; it becomes part of a graph that is being captured."""
        ...

    def capture(self, run: Callable[[], None]) -> Graph:
        """What `run` launches and calls, as a graph; nothing of it happens yet. It has run once before."""
        ...

    def finish(self) -> None:
        """Wait for all streams."""
        ...

    def staging(self, n_bytes: int) -> Tensor:
        """uint8 [n_bytes] of host memory that uploads do not wait for: it may be written again after `finish`."""
        ...

    def pinned(self, n_bytes: int) -> Memory:
        """Host memory that kernels of every device take."""
        ...

    def allocate(self, n_bytes: int) -> Memory: ...

    def handle_of(self, memory: Memory) -> bytes:
        """Of memory that `allocate` gave."""
        ...

    def open(self, handle: bytes, n_bytes: int, number: int, seal: bytes) -> Memory:
        """Another process's whole allocation on the device of that number. Raises HandleRefused, also if it does not begin with `seal`."""
        ...


class _Array:
    """Memory as torch and CuPy pass it to each other."""

    def __init__(self, address: int, n_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (n_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


class CudaRuntime:
    """One GPU. Raises KernelsUnavailable where it cannot be had, ConfigError for settings of torch that it cannot be had with."""

    on: Device = CUDA

    def __init__(self, number: int, *, peer_access: bool = True) -> None:
        """peer_access: False takes everything that is not this process's own as out of reach."""
        refuse_expandable_segments(os.environ)
        if not torch.cuda.is_available() or number >= torch.cuda.device_count():
            raise KernelsUnavailable(f"torch finds no GPU {number}: it has {torch.cuda.device_count()}; look at `nvidia-smi`")
        self.place, self.number = torch.device("cuda", number), number
        torch.cuda.set_device(self.place)
        self._cuda: Any = load_cupy().cuda.runtime
        self.enter_thread()
        self._peer_access, self._peers = peer_access, dict[int, Any]()
        new_stream: Any = torch.cuda.Stream
        self._compute, self._copy = new_stream(), new_stream()

    def enter_thread(self) -> None:
        torch.cuda.set_device(self.place)
        self._cuda.setDevice(self.number)  # CuPy may keep a current device of its own

    def load(self, programs: Sequence[Program]) -> None:
        cuda_library.load(programs)

    def settle(self) -> None:
        torch.cuda.synchronize(self.place)

    def alone(self) -> AbstractContextManager[None]:
        return locked(cache_folder() / f"device-{self._cuda.deviceGetPCIBusId(self.number)}.lock")

    @contextmanager
    def computing(self) -> Iterator[None]:
        with torch.cuda.stream(self._compute):
            yield

    @contextmanager
    def copying(self, *, behind_peers: bool = False) -> Iterator[None]:
        self._copy.wait_stream(self._compute)
        for stream in self._peers.values() if behind_peers else ():
            self._copy.wait_stream(stream)
        with torch.cuda.stream(self._copy):
            yield

    @contextmanager
    def on_peer(self, number: int) -> Iterator[None]:
        if number not in self._peers:
            new_stream: Any = torch.cuda.Stream
            self._peers[number] = new_stream(device=number)
        self._peers[number].wait_stream(self._copy)
        with _current(number), torch.cuda.stream(self._peers[number]):
            yield

    def reaches(self, number: int) -> bool:
        return self._peer_access and (number == self.number or torch.cuda.can_device_access_peer(self.number, number))

    def call(self, run: Callable[[], object]) -> None:
        run()

    def capture(self, run: Callable[[], None]) -> Graph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._compute, capture_error_mode="thread_local"):
            run()
        return graph

    def finish(self) -> None:
        self._compute.synchronize()
        self._copy.synchronize()
        for stream in self._peers.values():
            stream.synchronize()

    def staging(self, n_bytes: int) -> Tensor:
        return torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True)

    def pinned(self, n_bytes: int) -> Memory:
        address = self._cuda.hostAlloc(n_bytes, self._cuda.hostAllocPortable | self._cuda.hostAllocMapped)
        return Memory(torch.as_tensor(_Array(address, n_bytes)), lambda: self._cuda.freeHost(address))

    def allocate(self, n_bytes: int) -> Memory:
        address = self._cuda.malloc(-(-n_bytes // _GRANULE) * _GRANULE)  # a smaller one may share its granule, and so its handle
        return Memory(torch.as_tensor(_Array(address, n_bytes)), lambda: self._cuda.free(address))

    def handle_of(self, memory: Memory) -> bytes:
        return bytes(self._cuda.ipcGetMemHandle(memory.base.data_ptr()))

    def open(self, handle: bytes, n_bytes: int, number: int, seal: bytes) -> Memory:
        where = self.number if self.reaches(number) else number
        begins = np.empty(len(seal), np.uint8)
        with _current(where):
            try:
                address = self._cuda.ipcOpenMemHandle(handle)  # with peer access between devices, if it is another's
            except self._cuda.CUDARuntimeError as error:
                raise HandleRefused(str(error)) from error
            # not by torch, which would start a context on the device that it takes the memory for
            self._cuda.memcpy(begins.ctypes.data, address, len(seal), self._cuda.memcpyDefault)
            if begins.tobytes() != seal:
                self._cuda.ipcCloseMemHandle(address)
                raise HandleRefused("what the handle opens is not what it was made for")
            base = torch.as_tensor(_Array(address, n_bytes))

        def close() -> None:
            self.finish()
            with _current(where):
                self._cuda.ipcCloseMemHandle(address)

        return Memory(base, close)


@contextmanager
def _current(number: int) -> Iterator[None]:
    """For torch and for CuPy, which may each keep a current device."""
    with torch.cuda.device(number), load_cupy().cuda.Device(number):
        yield
