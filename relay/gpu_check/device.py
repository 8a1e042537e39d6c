"""Section `device`: what this machine has. Without it there is nothing to check."""

import torch

from relay.errors import ConfigError, KernelsUnavailable
from relay.gpu_check.report import Found, Skip
from relay.gpu_check.stage import Stage


def run(found: Found, rehearse: bool) -> None:
    """Raises Skip where there is no GPU, or no CuPy. Settings that no GPU can be had with are a failure where there is one."""
    try:
        stage = Stage((), rehearse=rehearse)
    except KernelsUnavailable as error:
        raise Skip(str(error)) from error
    except ConfigError as error:
        if not rehearse and not torch.cuda.is_available():
            raise Skip("torch finds no GPU; look at `nvidia-smi`") from error
        found.status, found.note = "failed", str(error)
        return
    if rehearse:
        found.note = "an emulated device: figures say nothing of any speed"
    else:
        properties = torch.cuda.get_device_properties(0)
        found.note = f"{properties.name}, compute capability {properties.major}.{properties.minor}, torch {torch.__version__}"
        found.rate("memory", properties.total_memory / 2**30, "GiB")
        found.rate("multiprocessors", properties.multi_processor_count, "")
    found.rate("copy, read and written", stage.copy_rate() / 1e12, "TB/s", note="the floor of what follows")
    found.rate("torch's bfloat16 product", stage.product_rate() / 1e12, "TFLOP/s", note="likewise")
