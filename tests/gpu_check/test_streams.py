"""Sections make what they launch kernels on where these run: torch's default stream and ours don't wait for each other.

An emulated device has no streams; what is seen here is inside of which `computing` tensors are made and kernels launched.
"""

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from relay.gpu_check.report import Found
from relay.gpu_check.section import MODULES
from relay.kernels.cuda_library import Argument, Grid, Launch
from relay.kernels.emulator.runtime import EmulatedRuntime, RecordingDevice


class Places(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps all tensors that were made on the default stream, so that no other takes their addresses."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.depth, self.n_launches = 0, 0
        self._outside: dict[int, Tensor] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and not self.depth:
            self._outside[made.untyped_storage().data_ptr()] = made
        return made

    def check(self, what: Launch, arguments: Sequence[Argument]) -> None:
        self.n_launches += 1
        assert self.depth, f"{what.kernel} is launched on the default stream"
        for argument in arguments:
            there = isinstance(argument, Tensor) and argument.untyped_storage().data_ptr() in self._outside
            assert not there, f"{what.kernel} takes what was made on the default stream"


@pytest.mark.parametrize("name", ["kernels", "sampling", "speed"])
def test_what_kernels_take_was_made_on_the_stream_that_they_run_on(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    places = Places()

    @contextmanager
    def computing(self: EmulatedRuntime) -> Iterator[None]:
        places.depth += 1
        try:
            yield
        finally:
            places.depth -= 1

    def launch(self: RecordingDevice, what: Launch, grid: Grid, block: int, arguments: Sequence[Argument], shared: int = 0) -> None:
        places.check(what, arguments)  # and nothing is computed: no result matters here

    monkeypatch.setattr(EmulatedRuntime, "computing", computing)
    monkeypatch.setattr(RecordingDevice, "launch", launch)
    with places:
        importlib.import_module(f"relay.gpu_check.{MODULES[name]}").run(Found(name), True)
    assert places.n_launches > 0
