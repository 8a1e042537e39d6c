"""The packed model that all engine workers of this host share: made once by the root, before any of them starts.

Packing runs in a process of its own, which may take what memory and threads it likes and is gone afterwards. The root holds the sealed
memfd; a worker maps it, and so is ready in a fraction of a second, however often it is started.
"""

import fcntl
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from relay.config import Config
from relay.errors import KernelsUnavailable, ModelError

_NOT_COVERED = 3
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


@dataclass(frozen=True)
class SharedWeights:
    """`fd` is None where the native kernels do not serve this model here; `note` says what was packed, or why not."""

    fd: int | None
    n_bytes: int | None
    note: str


def estimate(config: Config, model_path: Path) -> SharedWeights:
    """What `pack` would come to, without packing or compiling. Raises ModelError; KernelsUnavailable if the config insists on them."""
    from relay.engine.native.pack import packed_size
    from relay.kernels.cpp_library import best_instructions, find_compiler
    from relay.model.load import open_checkpoint

    if (without := _never_packed(config)) is not None:
        return without
    try:
        best_instructions()
        find_compiler()
        return SharedWeights(None, packed_size(open_checkpoint(model_path)), "")
    except KernelsUnavailable as error:
        return _without(config, str(error))


def pack(config: Config, model_path: Path, say: Callable[[str], None] = lambda what: None) -> SharedWeights:
    """`say` is told that it begins. Raises ModelError; KernelsUnavailable if the config insists on the native kernels and they are not to
    be had."""
    if (without := _never_packed(config)) is not None:
        return without
    say("packing the weights (the first time on this machine, also compiling the kernels: that takes longer)")
    fd = os.memfd_create("relay-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    command = [sys.executable, "-m", "relay.engine.native.pack", str(model_path), str(fd)]
    done = subprocess.run(command, pass_fds=(fd,), capture_output=True, text=True, check=False)
    if done.returncode == 0:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        return SharedWeights(fd, os.fstat(fd).st_size, done.stdout.strip())
    os.close(fd)
    words = (done.stderr.strip() or f"it ended with {done.returncode}").splitlines()[-1]
    if done.returncode == _NOT_COVERED:
        return _without(config, words)
    raise ModelError(f"the model cannot be packed for the native kernels: {words}; engine.runner: reference does without them")


def _never_packed(config: Config) -> SharedWeights | None:
    """Where the config itself keeps the native kernels out."""
    if config.device != "cpu":
        return SharedWeights(None, None, "")
    return SharedWeights(None, None, "the config asks for the reference") if config.engine.runner == "reference" else None


def _without(config: Config, why: str) -> SharedWeights:
    if config.engine.runner == "native":
        raise KernelsUnavailable(f"engine.runner is native: {why}")
    return SharedWeights(None, None, why)
