"""The emulator as a `Device`: the launchers of `relay.kernels` run on it unchanged, with CPU tensors.

`plain` runs in this process on the tensors themselves. With a sanitizer a launch is a process of its own that gets copies of the buffers,
each an allocation of exactly the tensor's bytes, and whose report is the error.
"""

import ctypes
import functools
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from torch import Tensor

from relay.kernels.cuda_compiler import Program
from relay.kernels.cuda_library import Argument, Grid, Launch
from relay.kernels.emulator.compiler import Mode, binary, entry_name

_SANITIZERS: Final = {
    "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1:exitcode=66:report_signal_unsafe=0",
}


class EmulatorError(RuntimeError):
    """What the emulator or a sanitizer reports of a kernel."""


class EmulatedDevice:
    """`programs`: all variants that may be launched, by stem. `source`: another file in place of a stem's own (for planted bugs)."""

    def __init__(self, programs: Sequence[Program], mode: Mode = "plain", *, seed: int = 0, source: Path | None = None) -> None:
        self._programs = tuple(programs)
        self._mode: Mode = mode
        self._seed = seed
        self._source = source
        self._binaries: dict[str, Path] = {}

    @property
    def type(self) -> str:
        return "cpu"

    def load(self, programs: Sequence[Program]) -> None:
        """Compile what is not compiled yet: no launch of theirs waits for it after that."""
        for program in programs:
            place = self._binary(program)
            if self._mode == "plain":
                _library(place)

    def launch(self, what: Launch, grid: Grid, block: int, arguments: Sequence[Argument], shared: int = 0) -> None:
        place = self._binary(what.program)
        shape = (*grid, block, 1, 1)
        name = entry_name(what.program, what.kernel).encode()
        if self._mode == "plain":
            _call(place, name, shape, arguments, shared, self._seed)
        else:
            _run(place, name, shape, arguments, shared, self._seed, self._mode)

    def _binary(self, program: Program) -> Path:
        """Looked up once: hashing the sources takes longer than a small launch."""
        place = self._binaries.get(program.stem)
        if place is None:
            alike = [each for each in self._programs if each.stem == program.stem]
            place = self._binaries[program.stem] = binary(self._source or program.path, alike, self._mode)
        return place


@functools.cache
def _library(place: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(place))
    library.emulator_launch.restype = ctypes.c_char_p
    return library


def _call(place: Path, name: bytes, shape: tuple[int, ...], arguments: Sequence[Argument], shared: int, seed: int) -> None:
    values = [ctypes.create_string_buffer(_scalar(a) + bytes(8)) for a in arguments]
    pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    sizes: Any = (ctypes.c_uint * 6)(*shape)
    n = ctypes.c_size_t(len(values))
    error = _library(place).emulator_launch(name, sizes, ctypes.c_size_t(shared), pointers, n, ctypes.c_uint64(seed))
    if error:
        raise EmulatorError(error.decode())


def _scalar(argument: Argument) -> bytes:
    if isinstance(argument, Tensor):
        return struct.pack("P", argument.data_ptr())
    return struct.pack("P", 0) if argument is None else np.asarray(argument).tobytes()


def _run(place: Path, name: bytes, shape: tuple[int, ...], arguments: Sequence[Argument], shared: int, seed: int, mode: Mode) -> None:
    message = struct.pack("=64s6IQQI", name, *shape, shared, seed, len(arguments))
    buffers = [a for a in arguments if isinstance(a, Tensor)]
    for a in arguments:
        content = _bytes(a) if isinstance(a, Tensor) else _scalar(a)
        message += struct.pack("=BQ", isinstance(a, Tensor), len(content)) + content
    fixed_addresses = [shutil.which("setarch") or "setarch", "-R"] if mode == "thread" else []
    with tempfile.TemporaryDirectory() as folder:
        into, out = Path(folder) / "in", Path(folder) / "out"
        into.write_bytes(message)
        command = [*fixed_addresses, str(place), str(into), str(out)]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | _SANITIZERS, check=False)
        if done.returncode:
            raise EmulatorError(done.stderr[-6000:] or f"the kernel's process ended with {done.returncode}")
        data = out.read_bytes()
    at = 0
    for tensor in buffers:
        n = tensor.numel() * tensor.element_size()
        ctypes.memmove(tensor.data_ptr(), data[at : at + n], n)
        at += n


def _bytes(tensor: Tensor) -> bytes:
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())
