"""trio under a seed: virtual time, and a run order that the seed alone decides.

The two names of trio that make it exact are private, and used here only; trio is pinned for them. With the flag each batch of tasks is
sorted by age and shuffled by `_r`; without it the order would depend on where objects lie in memory.
"""

import logging
import random
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import structlog
import trio
import trio._core._run as scheduler
import trio.testing

from relay.clock import replaced

_BEGAN_NS = 1_000_000_000_000  # so that no stamp is 0, which means "none" in places
T = TypeVar("T")


def run(main: Callable[[], Awaitable[T]], seed: int) -> T:
    """`main` on a mock clock that jumps whenever all tasks wait. Nothing is logged meanwhile."""
    names: Any = scheduler
    clock = trio.testing.MockClock(autojump_threshold=0)
    before, log = (names._ALLOW_DETERMINISTIC_SCHEDULING, names._r), structlog.get_config()
    names._ALLOW_DETERMINISTIC_SCHEDULING, names._r = True, random.Random(seed)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL), cache_logger_on_first_use=False)
    try:
        with replaced(lambda: _BEGAN_NS + round(clock.current_time() * 1e9)):  # threads too read it
            return trio.run(main, clock=clock)
    finally:
        names._ALLOW_DETERMINISTIC_SCHEDULING, names._r = before
        structlog.configure(**log)
