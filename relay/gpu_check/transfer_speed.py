"""Section `transfer`: a prompt's KV from one process's pool into another's on the same device: how fast, and how much of it hides behind
a step that computes."""

import json
import subprocess
import sys
import time
from collections.abc import Callable

import msgspec
import numpy as np
import torch

from relay.engine.cuda.pool import DevicePool
from relay.engine.cuda.pusher import DevicePusher
from relay.engine.runner import Push
from relay.gpu_check.report import Found
from relay.gpu_check.stage import Stage
from relay.kernels import kv_transfer
from relay.kv.layout import KVLayout
from relay.messages import PoolHandle

PROGRAMS = kv_transfer.PROGRAMS


def layout(n_blocks: int, rehearse: bool) -> KVLayout:
    """An 8B model's."""
    n_layers, n_heads, width = (2, 1, 64) if rehearse else (32, 8, 128)
    return KVLayout(n_layers=n_layers, n_kv_heads=n_heads, head_dim=width, block_tokens=16, dtype="bfloat16", n_blocks=n_blocks)


def run(found: Found, rehearse: bool) -> None:
    stage = Stage(PROGRAMS, rehearse=rehearse)
    n = stage.size(256, 3)
    own = DevicePool.create(layout(2 * n, rehearse), stage.runtime, 1)
    with stage.runtime.computing():
        own.words.random_()
        stage.runtime.finish()
    command = [sys.executable, "-m", "relay.gpu_check.pool_owner", str(int(rehearse)), str(2 * n)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        handle = msgspec.convert(json.loads(owner.stdout.readline()), PoolHandle)
        target = DevicePool.open(own.layout, stage.runtime, handle)
        _measure(stage, found, own, target, n)
        owner.communicate("")


def _measure(stage: Stage, found: Found, own: DevicePool, target: DevicePool, n: int) -> None:
    pusher = DevicePusher(own, stage.runtime)
    order = np.random.default_rng(0).permutation(2 * n)[:n].astype(np.int32)
    push = Push(target, order, order)
    layers, n_bytes = own.layout.n_layers, n * own.layout.block_bytes
    a = stage.normal(stage.size(4096, 32), stage.size(4096, 32))

    def compute() -> None:
        for _ in range(stage.size(6, 1)):  # a layer's worth of work
            torch.mm(a, a)

    def both(pushes: bool, computes: bool) -> None:
        with stage.runtime.computing():
            pusher.start((push,) if pushes else ())
            for layer in range(layers):
                if computes:
                    compute()
                pusher.layer(layer)
            sums = pusher.finish()[0]
        if pushes:
            assert np.array_equal(sums[0], wanted)

    wanted = own.checksums(order)
    pushing, computing, together = (
        _best(lambda: both(True, False)),
        _best(lambda: both(False, True)),
        _best(lambda: both(True, True)),
    )
    found.holds("what was pushed has its checksums there", np.array_equal(target.checksums(order), wanted))
    found.rate(f"push of {n_bytes >> 20} MiB to another process, 16 CUDA blocks", n_bytes / pushing / 1e9, "GB/s")
    found.time("a step's computing alone", 1e3 * computing, "ms")
    found.time("the same with the push behind it", 1e3 * together, "ms", least=1e3 * max(computing, pushing))
    hidden = max(0.0, computing + pushing - together) / min(computing, pushing)
    found.rate("share of the shorter that the longer hid", 100 * hidden, "%")


def _best(run: Callable[[], None]) -> float:
    times = []
    for _ in range(5):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times)
