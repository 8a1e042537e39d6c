"""Which GPUs there are, asked without torch: the root and `relay check` know before a worker starts. Imports CuPy only when asked."""

from relay.errors import KernelsUnavailable

_INSTALL = "pip install 'relayserve-pd[cuda]' installs it"


def count_gpus() -> int:
    """At least 1. Raises KernelsUnavailable: no CuPy, no driver, or no GPU."""
    try:
        from cupy.cuda import runtime
    except ImportError as error:
        raise KernelsUnavailable(f"CuPy cannot be imported ({error}); {_INSTALL}") from error
    try:
        count = int(runtime.getDeviceCount())
    except runtime.CUDARuntimeError as error:
        raise KernelsUnavailable(f"no NVIDIA GPU can be reached: {error}; look at `nvidia-smi`") from error
    if count == 0:
        raise KernelsUnavailable("the driver knows no GPU; look at `nvidia-smi` and CUDA_VISIBLE_DEVICES")
    return count
