"""A `Runtime` on the CPU: launches run in the emulator at once, device memory is shared memory, and IPC keeps CUDA's rules.

A graph is a list of launches with the addresses and scalars they had; while one is captured nothing runs. A handle names a memfd by its
maker's process and inode: who opens it needs the maker alive and its memory not freed, as on a GPU. `free` fills the memory with NaN, so
that whoever still maps it reads garbage, and the making process itself may not open its handles. For chaos tests a device can be lost, or
out of memory: then what uses it raises, as torch and CuPy do.
"""

import mmap
import os
import struct
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor

from relay.kernels.cuda_compiler import Program
from relay.kernels.cuda_devices import refuse_expandable_segments
from relay.kernels.cuda_library import Argument, Device, Grid, Launch
from relay.kernels.device_runtime import HANDLE_BYTES, Graph, Memory
from relay.kernels.emulator.device import EmulatedDevice

_HANDLE: Final = struct.Struct("<8sqqqqq16x")  # magic, pid, when that process started, descriptor, device, inode
_MAGIC: Final = b"emulated"
_POISON: Final = 0xFF
assert _HANDLE.size == HANDLE_BYTES


class DeviceLost(RuntimeError):
    """An emulated device is there no more: whatever is asked of it fails from now on."""


class RecordingDevice:
    """Launches on the emulator; while `recording`, into a list instead. `use` comes before each that runs, and may raise."""

    def __init__(self, programs: Sequence[Program], use: Callable[[], None]) -> None:
        self._device, self._use = EmulatedDevice(programs), use
        self.recording: list[Callable[[], object]] | None = None
        self.n_launches = 0

    @property
    def type(self) -> str:
        return self._device.type

    def launch(self, what: Launch, grid: Grid, block: int, arguments: Sequence[Argument], shared: int = 0) -> None:
        fixed = tuple(arguments)
        if self.recording is not None:
            self.recording.append(lambda: self.launch(what, grid, block, fixed, shared))
            return
        self._use()
        self.n_launches += 1
        self._device.launch(what, grid, block, fixed, shared)


class EmulatedGraph:
    def __init__(self, nodes: list[Callable[[], object]]) -> None:
        self._nodes = nodes

    def replay(self) -> None:
        for node in self._nodes:
            node()


class EmulatedRuntime:
    """`programs`: all that may be launched. Raises ConfigError where a GPU's would."""

    def __init__(self, programs: Sequence[Program]) -> None:
        refuse_expandable_segments(os.environ)
        self._recorder = RecordingDevice(programs, self._use)
        self._lost = self._exhausted = False
        self.on: Device = self._recorder
        self.place = torch.device("cpu")
        self._handles: dict[int, bytes] = {}  # by address
        self._mapped: weakref.WeakValueDictionary[bytes, mmap.mmap] = weakref.WeakValueDictionary()

    def lose(self) -> None:
        """From now on every launch, operation, allocation and wait raises DeviceLost, as all raise on a GPU that fell off its bus."""
        self._lost = True

    def exhaust(self) -> None:
        """The next launch, operation, allocation or wait raises torch.OutOfMemoryError; those after it go on."""
        self._exhausted = True

    def _use(self) -> None:
        if self._lost:
            raise DeviceLost("CUDA error: the device is lost (emulated)")
        if self._exhausted:
            self._exhausted = False
            raise torch.OutOfMemoryError("CUDA out of memory (emulated)")

    def enter_thread(self) -> None:
        torch.set_num_threads(1)

    @contextmanager
    def computing(self) -> Iterator[None]:
        yield

    @contextmanager
    def copying(self) -> Iterator[None]:
        yield

    def call(self, run: Callable[[], object]) -> None:
        if self._recorder.recording is not None:
            self._recorder.recording.append(lambda: self.call(run))
        else:
            self._use()
            run()

    def capture(self, run: Callable[[], None]) -> Graph:
        nodes: list[Callable[[], object]] = []
        self._recorder.recording = nodes
        try:
            run()
        finally:
            self._recorder.recording = None
        return EmulatedGraph(nodes)

    def finish(self) -> None:
        self._use()

    def staging(self, n_bytes: int) -> Tensor:
        return torch.empty(n_bytes, dtype=torch.uint8)

    def allocate(self, n_bytes: int) -> Memory:
        self._use()
        fd = os.memfd_create("relay-emulated", os.MFD_CLOEXEC)
        os.ftruncate(fd, n_bytes)
        base = torch.frombuffer(mmap.mmap(fd, n_bytes), dtype=torch.uint8)
        address, status = base.data_ptr(), os.fstat(fd)
        self._handles[address] = _HANDLE.pack(_MAGIC, os.getpid(), _started(os.getpid()), fd, status.st_dev, status.st_ino)

        def free() -> None:
            base.fill_(_POISON)
            del self._handles[address]
            os.close(fd)

        return Memory(base, free)

    def handle_of(self, memory: Memory) -> bytes:
        return self._handles[memory.base.data_ptr()]

    def open(self, handle: bytes, n_bytes: int) -> Memory | None:
        """Raises ValueError for a handle of this very process, and for bytes that are none."""
        if len(handle) != HANDLE_BYTES or not handle.startswith(_MAGIC):
            raise ValueError(f"{len(handle)} bytes are no handle of an emulated device's memory")
        _, pid, started, fd, device, inode = _HANDLE.unpack(handle)
        if pid == os.getpid():
            raise ValueError("the handle is of this process, which cannot open it: use the memory itself")
        mapped = self._mapped.get(handle)
        if mapped is None:
            mapped = _map(pid, started, fd, (device, inode), n_bytes)
            if mapped is None:
                return None
            self._mapped[handle] = mapped
        return Memory(torch.frombuffer(mapped, dtype=torch.uint8), lambda: None)  # unmapped with the last tensor on it


def _map(pid: int, started: int, fd: int, identity: tuple[int, int], n_bytes: int) -> mmap.mmap | None:
    try:
        if _started(pid) != started:
            return None
        theirs = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        status = os.fstat(theirs)
        if (status.st_dev, status.st_ino) != identity or status.st_size < n_bytes:
            return None
        return mmap.mmap(theirs, n_bytes)
    finally:
        os.close(theirs)


def _started(pid: int) -> int:
    """When a process began, in ticks since the machine did: a number used again is another process. Raises OSError."""
    with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
        return int(file.read().rpartition(")")[2].split()[19])
