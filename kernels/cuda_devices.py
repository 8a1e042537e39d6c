"""Which GPUs there are, asked without torch: the root and `relay check` know before a worker starts.

`python -m relay.kernels.cuda_devices` is a process of its own, since whoever asks a GPU for its free memory holds a part of it until the
end. It imports CuPy, and prints JSON.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Final

import msgspec

from relay.errors import ConfigError, KernelsUnavailable

ORDER: Final = ("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # as nvidia-smi counts
_INSTALL: Final = "pip install 'relayserve-pd[cuda]' installs it"
_WITHIN_S: Final = 60.0
_ALLOCATOR_SETTINGS: Final = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """free, total: bytes now. peers: numbers of GPUs whose memory it can map, by NVLink or PCIe."""

    name: str
    free: int
    total: int
    peers: tuple[int, ...]


def find_gpus() -> tuple[Gpu, ...]:
    """At least one, by number. Raises KernelsUnavailable: no CuPy, no driver, or no GPU."""
    command = [sys.executable, "-m", "relay.kernels.cuda_devices"]
    environment = {**os.environ, ORDER[0]: ORDER[1]}
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=_WITHIN_S)
        found = msgspec.json.decode(done.stdout, type=tuple[Gpu, ...] | str)
    except (subprocess.TimeoutExpired, msgspec.DecodeError) as error:
        raise KernelsUnavailable(f"the GPUs cannot be asked: {error}; look at `nvidia-smi`") from error
    if isinstance(found, str):
        raise KernelsUnavailable(found)
    return found


def refuse_expandable_segments(environment: Mapping[str, str]) -> None:
    """torch's expandable segments are made of memory that IPC handles cannot name. Raises ConfigError, naming the variable."""
    for name in _ALLOCATOR_SETTINGS:
        for setting in environment.get(name, "").split(","):
            key, _, value = setting.partition(":")
            if key.strip() == "expandable_segments" and value.strip().lower() == "true":
                raise ConfigError(
                    f"the environment variable {name} is `{environment[name]}`: torch's expandable segments break memory handles between "
                    "processes; take expandable_segments out of it"
                )


def _ask() -> tuple[Gpu, ...] | str:
    """What there is, or why not."""
    try:
        from cupy.cuda import Device, runtime
    except ImportError as error:
        return f"CuPy cannot be imported ({error}); {_INSTALL}"
    try:
        count, found = int(runtime.getDeviceCount()), []
        for number in range(count):
            with Device(number):
                free, total = runtime.memGetInfo()
                name = runtime.getDeviceProperties(number)["name"].decode()
            peers = tuple(other for other in range(count) if other != number and runtime.deviceCanAccessPeer(number, other))
            found.append(Gpu(name=name, free=free, total=total, peers=peers))
    except runtime.CUDARuntimeError as error:
        return f"no NVIDIA GPU can be reached: {error}; look at `nvidia-smi`"
    return tuple(found) or "the driver knows no GPU; look at `nvidia-smi` and CUDA_VISIBLE_DEVICES"


if __name__ == "__main__":
    print(json.dumps(msgspec.to_builtins(_ask())))
