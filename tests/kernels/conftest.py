"""What the CUDA kernels' tests need compiled is compiled ahead of them, in the order of the tests, on another core."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from relay.kernels.cuda_compiler import build
from relay.kernels.emulator.compiler import FLAGS, binary
from relay.kernels.emulator.device import EmulatedDevice
from tests.kernels.planted import PLANTED


@pytest.fixture(scope="session", autouse=True)
def _built_ahead(request: pytest.FixtureRequest) -> Iterator[None]:
    if PLANTED in request.config.stash:
        yield
        return
    modules = list(dict.fromkeys(item.module for item in request.session.items if isinstance(item, pytest.Function)))
    with ThreadPoolExecutor(1) as pool:
        for module in modules[1:]:
            for program, architecture in getattr(module, "CHOSEN", ()):
                pool.submit(build, program, architecture)
            if isinstance(getattr(module, "PLAIN", None), EmulatedDevice):
                for mode in FLAGS:
                    programs = module.PROGRAMS if mode == "plain" else getattr(module, "WATCHED", module.PROGRAMS)
                    pool.submit(binary, programs[0].path, programs, mode)
        yield
        pool.shutdown(cancel_futures=True)
