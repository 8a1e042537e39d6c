"""The compute thread: results in order, an exception is the actor's, cancelling ends it after its step, an idle one uses no CPU."""

import os
import threading
import time

import pytest
import trio
import trio.testing

from relay.errors import EngineDied
from relay.runtime.compute import ComputeThread


def alive(name: str) -> bool:
    return any(thread.name == name and thread.is_alive() for thread in threading.enumerate())


def test_results_arrive_in_order_and_the_thread_ends_with_the_actor() -> None:
    got: list[int] = []

    async def main() -> None:
        with trio.fail_after(60), trio.CancelScope() as scope:
            engine = ComputeThread[int, list[int]](lambda jobs: (jobs, False), name="in order")

            def on_results(results: list[list[int]]) -> None:
                got.extend(n for jobs in results for n in jobs)
                if len(got) == 100:
                    scope.cancel()
                elif len(got) == 1:  # the thread takes it while others wait
                    for n in range(1, 100):
                        engine.submit(n)

            engine.submit(0)
            await engine.run(on_results)

    trio.run(main)
    assert got == list(range(100))
    assert not alive("in order")


def test_a_result_waits_until_the_next_step_tells_and_the_thread_ends_behind_what_step_began() -> None:
    """The second step sees whether the loop has been told of the first when it begins to compute, and when it is over."""
    got: list[int] = []
    seen: list[list[int]] = []
    ends: list[str] = []

    async def main() -> None:
        def step(jobs: list[int]) -> tuple[int, bool]:
            number = jobs[0] if jobs else 1
            trio.from_thread.run(trio.testing.wait_all_tasks_blocked, trio_token=token)
            seen.append(list(got))
            engine.tell()
            trio.from_thread.run(trio.testing.wait_all_tasks_blocked, trio_token=token)
            seen.append(list(got))
            return number, number == 0

        token = trio.lowlevel.current_trio_token()
        engine = ComputeThread[int, int](step, name="tells", tells=True, on_thread_end=lambda: ends.append("settled"))
        with trio.fail_after(60), trio.CancelScope() as scope:

            def on_results(results: list[int]) -> None:
                got.extend(results)
                if got[-1] == 1:
                    scope.cancel()

            engine.submit(0)
            await engine.run(on_results)
        ends.append("run ended")

    trio.run(main)
    assert seen == [[], [], [], [0]]
    assert got == [0, 1]
    assert ends == ["settled", "run ended"]


def test_a_busy_step_is_called_again_without_jobs_and_then_waits_for_one() -> None:
    calls: list[list[int]] = []
    got: list[int] = []

    def step(jobs: list[int]) -> tuple[int | None, bool]:
        calls.append(jobs)
        return (len(calls) if len(calls) != 2 else None), len(calls) < 3

    async def main() -> None:
        engine = ComputeThread[int, int](step)
        with trio.fail_after(60), trio.CancelScope() as scope:

            def on_results(results: list[int]) -> None:
                got.extend(results)
                if got[-1] == 3:
                    engine.submit(8)
                if got[-1] == 4:
                    scope.cancel()

            engine.submit(7)
            await engine.run(on_results)
        assert engine.steps == 4
        assert engine.step_age_s() == 0.0

    trio.run(main)
    assert calls == [[7], [], [], [8]]
    assert got == [1, 3, 4], "a step without a result wakes nobody"


def test_an_exception_of_a_step_ends_the_actor_after_the_results_before_it() -> None:
    got: list[float] = []

    divisors = [1, 2, 0]

    async def main() -> None:
        engine = ComputeThread[int, float](lambda jobs: (1 / divisors.pop(0), True))
        engine.submit(0)
        with trio.fail_after(60):
            await engine.run(got.extend)

    with pytest.raises(EngineDied, match="ZeroDivisionError") as caught:
        trio.run(main)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert got == [1.0, 0.5]


def test_cancelling_waits_for_the_present_step() -> None:
    started, go_on = threading.Event(), threading.Event()
    ended: list[bool] = []

    def step(jobs: list[int]) -> tuple[None, bool]:
        started.set()
        go_on.wait(5)
        ended.append(True)
        return None, True

    async def main() -> None:
        engine = ComputeThread[int, None](step)
        engine.submit(0)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.run, lambda results: None)
            await trio.to_thread.run_sync(started.wait, 5)
            assert engine.step_age_s() > 0
            nursery.cancel_scope.cancel()
            threading.Timer(0.05, go_on.set).start()
        assert ended == [True], "the step was still running when its actor had ended"

    trio.run(main)


def test_the_thread_starts_with_its_hook_and_its_niceness() -> None:
    seen: list[tuple[str, int]] = []

    def hook() -> None:
        seen.append((threading.current_thread().name, os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))

    async def main() -> None:
        engine = ComputeThread[int, int](lambda jobs: (1, False), name="nice", on_thread_start=hook)
        engine.submit(0)
        with trio.fail_after(60), trio.CancelScope() as scope:
            await engine.run(lambda results: scope.cancel())

    mine = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    trio.run(main)
    assert seen == [("nice", min(mine + 5, 19))]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == mine


def test_a_hook_that_fails_ends_the_actor() -> None:
    def hook() -> None:
        raise OSError("no such core")

    async def main() -> None:
        with trio.fail_after(60):
            await ComputeThread[int, int](lambda jobs: (1, False), on_thread_start=hook).run(lambda results: None)

    with pytest.raises(EngineDied, match="OSError: no such core"):
        trio.run(main)


def test_an_idle_thread_uses_no_cpu() -> None:
    clocks: list[int] = []

    async def main() -> None:
        engine = ComputeThread[int, int](
            lambda jobs: (1, False), on_thread_start=lambda: clocks.append(time.pthread_getcpuclockid(threading.get_ident()))
        )
        async with trio.open_nursery() as nursery:
            first = trio.Event()
            nursery.start_soon(engine.run, lambda results: first.set())
            engine.submit(0)
            with trio.fail_after(60):
                await first.wait()
            await trio.sleep(0.05)
            before = time.clock_gettime_ns(clocks[0])
            await trio.sleep(0.2)
            assert time.clock_gettime_ns(clocks[0]) == before
            nursery.cancel_scope.cancel()

    trio.run(main)


def test_what_has_arrived_can_be_seen_by_a_running_step_and_is_given_to_the_next() -> None:
    """Once, in order, with what comes later."""
    seen: list[list[int]] = []
    calls: list[list[int]] = []

    def step(jobs: list[int]) -> tuple[int | None, bool]:
        calls.append(jobs)
        if jobs == [1]:
            engine.submit(2)
            engine.submit(3)
            seen.extend((engine.arrived(), engine.arrived()))
            engine.submit(4)
        return len(calls), False

    async def main() -> None:
        with trio.fail_after(60), trio.CancelScope() as scope:
            engine.submit(1)
            await engine.run(lambda results: scope.cancel() if results[-1] == 2 else None)

    engine = ComputeThread[int, int](step)
    trio.run(main)
    assert seen == [[2, 3], [2, 3]]
    assert calls == [[1], [2, 3, 4]]
