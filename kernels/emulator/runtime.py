"""A `Runtime` on the CPU: launches run in the emulator at once, device memory is shared memory, and IPC keeps CUDA's rules.

A graph is a list of launches with the addresses and scalars they had; while one is captured nothing runs. A handle names a memfd by its
maker's process and inode: who opens it needs the maker alive and its memory not freed, as on a GPU. `free` fills the memory with NaN, so
that whoever still maps it reads garbage, and the making process itself may not open its handles. For chaos tests a device can be lost, or
out of memory: then what uses it raises, as torch and CuPy do. Without peer access a launch that touches what it does not reach raises.
"""

import mmap
import os
import struct
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final

import torch
from torch import Tensor

from relay.kernels.cuda_compiler import Program
from relay.kernels.cuda_devices import refuse_expandable_segments
from relay.kernels.cuda_library import Argument, Device, Grid, Launch
from relay.kernels.device_runtime import HANDLE_BYTES, Graph, HandleRefused, Memory
from relay.kernels.emulator.device import EmulatedDevice, EmulatorError

_HANDLE: Final = struct.Struct("<8sqqqqq16x")  # magic, pid, when that process started, descriptor, device, inode
_MAGIC: Final = b"emulated"
_POISON: Final = 0xFF
assert _HANDLE.size == HANDLE_BYTES


class DeviceLost(RuntimeError):
    """An emulated device is there no more: whatever is asked of it fails from now on."""


class RecordingDevice:
    """Launches on the emulator; while `recording`, into a list instead. `use(arguments)` comes before each that runs, and may raise."""

    def __init__(self, programs: Sequence[Program], use: Callable[[Sequence[Argument]], None]) -> None:
        self._device, self._use = EmulatedDevice(programs), use
        self.recording: list[Callable[[], object]] | None = None
        self.n_launches = 0

    @property
    def type(self) -> str:
        return self._device.type

    def load(self, programs: Sequence[Program]) -> None:
        self._device.load(programs)

    def launch(self, what: Launch, grid: Grid, block: int, arguments: Sequence[Argument], shared: int = 0) -> None:
        fixed = tuple(arguments)
        if self.recording is not None:
            self.recording.append(lambda: self.launch(what, grid, block, fixed, shared))
            return
        self._use(fixed)
        self.n_launches += 1
        self._device.launch(what, grid, block, fixed, shared)


class EmulatedGraph:
    def __init__(self, nodes: list[Callable[[], object]]) -> None:
        self._nodes = nodes

    def replay(self) -> None:
        for node in self._nodes:
            node()


class EmulatedRuntime:
    """`programs`: all that may be launched. peer_access: whether others' memory is in reach. Raises ConfigError as CudaRuntime does.

    What is launched on a peer happens as late as it may: when somebody waits for it.
    """

    number = 0

    def __init__(self, programs: Sequence[Program], *, peer_access: bool = True) -> None:
        refuse_expandable_segments(os.environ)
        self._recorder = RecordingDevice(programs, self._use)
        self._lost = self._exhausted = False
        self.on: Device = self._recorder
        self.place = torch.device("cpu")
        self._handles: dict[int, bytes] = {}  # by address
        self._peer_access, self._is_on_peer = peer_access, False
        self._on_peers: list[Callable[[], object]] = []  # launched there, and not yet run
        self._own, self._far = dict[int, int](), dict[int, int]()  # bytes by address: of this device, and of those out of its reach
        self._mapped: weakref.WeakValueDictionary[bytes, mmap.mmap] = weakref.WeakValueDictionary()

    def lose(self) -> None:
        """From now on every launch, operation, allocation and wait raises DeviceLost, as all raise on a GPU that fell off its bus."""
        self._lost = True

    def exhaust(self) -> None:
        """The next launch, operation, allocation or wait raises torch.OutOfMemoryError; those after it go on."""
        self._exhausted = True

    def _use(self, arguments: Sequence[Argument] = ()) -> None:
        """Of the device that is current. Raises what is wrong with it, or with memory that it does not reach."""
        if self._lost:
            raise DeviceLost("CUDA error: the device is lost (emulated)")
        if self._exhausted:
            self._exhausted = False
            raise torch.OutOfMemoryError("CUDA out of memory (emulated)")
        strange = self._own if self._is_on_peer else self._far
        for tensor in arguments:
            if isinstance(tensor, Tensor) and any(begin <= tensor.data_ptr() < begin + n_bytes for begin, n_bytes in strange.items()):
                raise EmulatorError("illegal memory access: a kernel touches memory of a device that its own does not reach")

    def enter_thread(self) -> None:
        torch.set_num_threads(1)

    def load(self, programs: Sequence[Program]) -> None:
        self._recorder.load(programs)

    def settle(self) -> None:
        self._use()

    def alone(self) -> AbstractContextManager[None]:
        return nullcontext()  # each process has a device of its own

    @contextmanager
    def computing(self) -> Iterator[None]:
        yield

    @contextmanager
    def copying(self, *, behind_peers: bool = False) -> Iterator[None]:
        if behind_peers:
            self._run_on_peers()
        yield

    @contextmanager
    def on_peer(self, number: int) -> Iterator[None]:
        before, self._recorder.recording = self._recorder.recording, self._on_peers
        try:
            yield
        finally:
            self._recorder.recording = before

    def _run_on_peers(self) -> None:
        launched, self._on_peers = self._on_peers, []
        self._is_on_peer = True
        try:
            for run in launched:
                run()
        finally:
            self._is_on_peer = False

    def reaches(self, number: int) -> bool:
        return self._peer_access

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
        self._run_on_peers()

    def staging(self, n_bytes: int) -> Tensor:
        return torch.empty(n_bytes, dtype=torch.uint8)

    def pinned(self, n_bytes: int) -> Memory:
        return Memory(torch.zeros(n_bytes, dtype=torch.uint8), lambda: None)

    def allocate(self, n_bytes: int) -> Memory:
        self._use()
        fd = os.memfd_create("relay-emulated", os.MFD_CLOEXEC)
        os.ftruncate(fd, n_bytes)
        base = torch.frombuffer(mmap.mmap(fd, n_bytes), dtype=torch.uint8)
        address, status = base.data_ptr(), os.fstat(fd)
        self._own[address] = n_bytes
        self._handles[address] = _HANDLE.pack(_MAGIC, os.getpid(), _started(os.getpid()), fd, status.st_dev, status.st_ino)

        def free() -> None:
            base.fill_(_POISON)
            del self._handles[address], self._own[address]
            os.close(fd)

        return Memory(base, free)

    def handle_of(self, memory: Memory) -> bytes:
        return self._handles[memory.base.data_ptr()]

    def open(self, handle: bytes, n_bytes: int, number: int, seal: bytes) -> Memory:
        """Raises ValueError too: for a handle of this very process, and for bytes that are none."""
        if len(handle) != HANDLE_BYTES or not handle.startswith(_MAGIC):
            raise ValueError(f"{len(handle)} bytes are no handle of an emulated device's memory")
        _, pid, started, fd, device, inode = _HANDLE.unpack(handle)
        if pid == os.getpid():
            raise ValueError("the handle is of this process, which cannot open it: use the memory itself")
        mapped = self._mapped.get(handle)
        if mapped is None:
            mapped = self._mapped[handle] = _map(pid, started, fd, (device, inode), n_bytes)
        if mapped[: len(seal)] != seal:
            raise HandleRefused("what the handle opens is not what it was made for (emulated)")
        base = torch.frombuffer(mapped, dtype=torch.uint8)
        address = base.data_ptr()
        if not self.reaches(number):
            self._far[address] = n_bytes

        def close() -> None:
            self._far.pop(address, None)  # unmapped with the last tensor on it

        return Memory(base, close)


def _map(pid: int, started: int, fd: int, identity: tuple[int, int], n_bytes: int) -> mmap.mmap:
    """Raises HandleRefused."""
    try:
        if _started(pid) != started:
            raise HandleRefused(f"process {pid}, which made the handle, has ended (emulated)")
        theirs = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise HandleRefused(f"process {pid} has ended, or freed what the handle names (emulated)") from error
    try:
        status = os.fstat(theirs)
        if (status.st_dev, status.st_ino) != identity or status.st_size < n_bytes:
            raise HandleRefused(f"process {pid} has freed what the handle names (emulated)")
        return mmap.mmap(theirs, n_bytes)
    finally:
        os.close(theirs)


def _started(pid: int) -> int:
    """When a process began, in ticks since the machine did: a number used again is another process. Raises OSError."""
    with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
        return int(file.read().rpartition(")")[2].split()[19])
