"""The generator's verdict on itself."""

import time

import trio
from trio.testing import MockClock

from relay.bench.meter import Generator, Meter


async def measured(block_s: float, tpot_ms: float) -> Generator:
    """Beside a task that takes the loop for `block_s` again and again."""
    meter = Meter()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(meter.run)
        for _ in range(6):
            time.sleep(block_s)
            await trio.sleep(0.001)
        nursery.cancel_scope.cancel()
    return meter.read(1000, tpot_ms)


def test_a_loop_that_is_held_up_is_saturated() -> None:
    found = trio.run(measured, 0.12, 1.0)
    assert found.saturated
    assert "late" in found.reason
    assert found.lag_p99_ms > 50


def test_the_same_lag_does_not_matter_beside_tokens_that_take_seconds() -> None:
    found = trio.run(measured, 0.12, 10_000.0)
    assert not found.saturated
    assert found.lag_p99_ms > 50


def test_a_busy_core_is_saturated() -> None:
    async def spin() -> Generator:
        meter = Meter()
        until = time.process_time() + 0.2
        while time.process_time() < until:
            pass
        return meter.read(1000, 10_000.0)

    found = trio.run(spin, clock=MockClock(rate=0.05))  # a clock on which it used twenty cores, however busy this machine is
    assert found.saturated
    assert "core" in found.reason
    assert found.cpu_us_per_token is not None
    assert found.cpu_us_per_token >= 200


def test_an_idle_generator_is_not_saturated_and_without_tokens_has_no_cost() -> None:
    async def rest() -> Generator:
        meter = Meter()
        with trio.move_on_after(60.0):
            await meter.run()
        return meter.read(0, 1.0)

    found = trio.run(rest, clock=MockClock(autojump_threshold=0))
    assert not found.saturated
    assert (found.lag_max_ms, found.cpu_us_per_token) == (0.0, None)
