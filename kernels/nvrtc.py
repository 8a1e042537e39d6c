"""NVIDIA's runtime compiler, called directly: needs the package nvidia-cuda-nvrtc (or a CUDA toolkit), no driver and no device.

    compile_source(source, "paged_decode.cu", ("--gpu-architecture=sm_90", ...)) -> (cubin, what it said)
    version() -> (13, 0)

Source: docs.nvidia.com/cuda/nvrtc.
"""

import ctypes
import functools
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from relay.errors import KernelsUnavailable

_LIBRARY: Final = "libnvrtc.so.13"
_COMPILATION_ERROR: Final = 6


def compile_source(source: bytes, name: str, flags: Sequence[str]) -> tuple[bytes, str]:
    """Raises KernelsUnavailable, with what the compiler said."""
    handle = ctypes.c_void_p()
    _call("nvrtcCreateProgram", ctypes.byref(handle), source, name.encode(), 0, None, None)
    try:
        options = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
        status = _library().nvrtcCompileProgram(handle, len(flags), options)
        said = _fetch("ProgramLog", handle).decode(errors="replace").rstrip("\0")
        if status:
            what = said[:4000] if status == _COMPILATION_ERROR else _meaning(status)
            raise KernelsUnavailable(f"NVRTC did not compile {name} with {' '.join(flags)}:\n{what}")
        return _fetch("CUBIN", handle), said
    finally:
        _call("nvrtcDestroyProgram", ctypes.byref(handle))


def version() -> tuple[int, int]:
    """Raises KernelsUnavailable where there is no NVRTC."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


def _fetch(what: str, handle: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    _call(f"nvrtcGet{what}Size", handle, ctypes.byref(size))
    content = ctypes.create_string_buffer(size.value)
    _call(f"nvrtcGet{what}", handle, content)
    return content.raw


def _call(name: str, *arguments: object) -> None:
    status = getattr(_library(), name)(*arguments)
    if status:
        raise KernelsUnavailable(f"{name} failed: {_meaning(status)}")


def _meaning(status: int) -> str:
    _library().nvrtcGetErrorString.restype = ctypes.c_char_p
    text = _library().nvrtcGetErrorString(status)
    return text.decode() if isinstance(text, bytes) else str(status)


@functools.cache
def _library() -> ctypes.CDLL:
    found = importlib.util.find_spec("nvidia")
    folders = [Path(folder) / "cu13" / "lib" for folder in (found and found.submodule_search_locations) or ()]
    reason: OSError | None = None
    for folder in (*folders, None):
        try:
            if folder is None:
                return ctypes.CDLL(_LIBRARY)
            for part in folder.glob("libnvrtc-builtins.so.*"):  # which it would look for on the system's path only
                ctypes.CDLL(str(part))
            return ctypes.CDLL(str(folder / _LIBRARY))
        except OSError as error:
            reason = error
    raise KernelsUnavailable(f"building cubins needs the package nvidia-cuda-nvrtc of CUDA 13; install it ({reason})")
