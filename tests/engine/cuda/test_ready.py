"""A device worker that is ready: nothing is left to be compiled, loaded or made by its first request, and nothing of its start remains."""

import contextlib
import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs
from torch.utils._python_dispatch import TorchDispatchMode

from relay.config import EngineConfig
from relay.engine.board import StepBoard
from relay.engine.cuda.compute import cuda_compute, device_pools, open_device
from relay.engine.cuda.pool import SEAL_BYTES, DevicePool
from relay.engine.cuda.probe import copy_rate, product_rate
from relay.engine.cuda.programs import programs_for
from relay.engine.cuda.runner import CudaRunner
from relay.engine.measured import Measured
from relay.engine.start import start_engine
from relay.kernels.cuda_compiler import kernels_of
from relay.kernels.device_runtime import Memory, Runtime
from relay.kernels.emulator import runtime as emulator
from relay.kernels.emulator.runtime import EmulatedRuntime
from relay.kv.book import BlockBook
from relay.kv.memory import create
from relay.messages import Address, PoolHandle
from relay.model.load import open_checkpoint
from relay.model.source import resolve
from tests.engine.cuda.models import LIMITS, SMALL, checkpoint, device_layout, runner_on, runtime_for

MODEL = "random:tiny-llama-64"
PAST_LIFE = {"few_rows_ms": 1.0, "many_rows_ms": 2.0, "many_rows_far_ms": 2.0, "device_bytes_per_s": 1e12, "device_flops_per_s": 1e12}


@pytest.fixture
def device() -> Runtime:
    return open_device(resolve(MODEL, sha256=None), "bfloat16", None, peer_access=True)


def compute_on(device: Runtime, tmp_path: Path) -> Any:
    """As in a second life, whose first has measured what there is to measure."""
    path = tmp_path / "measured-a.json"
    path.write_text(json.dumps(PAST_LIFE))
    model = resolve(MODEL, sha256=None)
    pool = DevicePool.create(device_layout(open_checkpoint(model).spec, 40), device, epoch=2)
    return cuda_compute(model, pool, device, LIMITS, Measured(path), exact=True, torch_attention=False)


def test_an_open_device_has_nothing_to_compile(device: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_now(*_: object) -> Path:
        raise AssertionError("a program was not loaded when the device was opened")

    monkeypatch.setattr("relay.kernels.emulator.device.binary", compile_now)
    compute_on(device, tmp_path)


def test_every_kernel_has_run_before_the_worker_is_ready_in_its_later_lives_too(
    device: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched, launch = set(), device.on.launch

    def noted(what: Any, *arguments: Any) -> None:
        launched.add((what.program.name, what.kernel))
        launch(what, *arguments)

    monkeypatch.setattr(device.on, "launch", noted)
    compute_on(device, tmp_path)
    spec = open_checkpoint(resolve(MODEL, sha256=None)).spec
    wanted = {
        (program.name, kernel) for program in programs_for(spec, "bfloat16", frozenset(("BF16",))) for kernel in kernels_of(program.path)
    }
    assert len(wanted) > 10
    assert launched == wanted


def test_what_was_made_on_torchs_stream_is_waited_for_before_the_first_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, seen = runtime_for(64), list[str]()
    launch, make = runtime.on.launch, CudaRunner._make_buffers

    def noted(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            seen.append(name)
            return run(*arguments)

        return call

    monkeypatch.setattr(runtime.on, "launch", noted("launch", launch))
    monkeypatch.setattr(CudaRunner, "_make_buffers", noted("buffers", make))
    monkeypatch.setattr(runtime, "settle", noted("settle", lambda: None))
    runner_on(checkpoint(), runtime, 8)
    assert seen[:3] == ["buffers", "settle", "launch"]


def test_steps_are_timed_while_no_other_worker_of_the_device_times_its_own(device: Runtime, tmp_path: Path) -> None:
    inside, steps = list[bool](), list[int]()

    @contextlib.contextmanager
    def alone() -> Iterator[None]:
        inside.append(True)
        yield
        inside.pop()

    compute = dataclasses.replace(compute_on(device, tmp_path), alone=alone)
    step = compute.runner.step

    def noted(batch: Any) -> Any:
        steps.append(len(inside))
        return step(batch)

    compute.runner.step = noted
    start_engine(compute, EngineConfig(max_running=LIMITS.max_running), BlockBook(40), StepBoard(create("board", 1 << 16)), Measured())
    assert len(steps) >= 7
    assert set(steps) == {1}


def test_probing_takes_no_memory_but_the_pools_and_leaves_zeros() -> None:
    runtime = runtime_for(64)
    pool = DevicePool.create(device_layout(SMALL, 8), runtime, epoch=1)
    made, own = list[int](), pool.words.untyped_storage().data_ptr()

    class Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = func(*args, **(kwargs or {}))
            if isinstance(found, torch.Tensor):
                made.append(found.untyped_storage().data_ptr())
            return found

    with Allocations():  # type: ignore[no-untyped-call]
        rates = [copy_rate(pool, runtime), product_rate(pool, runtime)]
    assert set(made) == {own}
    assert all(0 < rate < 1e15 for rate in rates)
    assert not pool.words.any()


@pytest.mark.parametrize("far", [None, 1])
def test_block_numbers_go_to_the_device_that_launches_wherever_the_blocks_are(far: int | None) -> None:
    """Memory of another device that is in reach may look like that one's to torch: `meta` plays it here."""
    layout = device_layout(SMALL, 4)
    memory = Memory(torch.empty(SEAL_BYTES + layout.pool_bytes, dtype=torch.uint8, device="meta"), lambda: None)
    handle = PoolHandle(b"", SEAL_BYTES, layout.pool_bytes, 1, 1, 1)
    pool = DevicePool(layout, runtime_for(64), memory, handle, far)
    assert pool.words.device.type == "meta"
    wanted = "cpu" if far is None else "meta"
    assert pool.numbers(np.arange(3, dtype=np.int32)).device.type == wanted
    assert pool._sums(3).device.type == wanted


def test_why_a_pool_cannot_be_opened_is_logged_once_with_what_to_do() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    runtime = EmulatedRuntime(())
    handle = emulator._HANDLE.pack(emulator._MAGIC, gone.pid, 0, 3, 0, 0)
    layout = device_layout(SMALL, 4)
    map_pool = device_pools(layout, runtime)
    with capture_logs() as logs:
        for epoch in (1, 2):
            told = PoolHandle(handle, SEAL_BYTES, layout.pool_bytes, epoch, 7, 0)
            assert map_pool(Address("decode/0", epoch), told) is None
    (line,) = logs
    assert line["log_level"] == "warning"
    assert f"process {gone.pid}" in line["reason"]
    assert "--ipc=host" in line["what_to_do"]
    assert line["of"] == str(Address("decode/0", 1))
