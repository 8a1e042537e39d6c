"""A dead worker is replaced by a process that is there already, if that one still lives; and no spare is left behind."""

import errno
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
import trio

from relay.runtime import spares
from relay.runtime.child import Child
from tests.runtime.test_supervisor import Server, gone, names, serve


async def spare_of(server: Server, *but: int) -> int:
    """The pid of a spare that waits, other than these."""
    while True:
        for event in server.events:
            if event["event"] == "spare_started" and event["pid"] not in but:
                return int(event["pid"])
        await server.changed()


def test_a_spare_takes_the_place_of_a_dead_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spares, "_CALM_S", 0.05)
    seen: list[int] = []

    async def scenario(server: Server) -> None:
        for epoch in (1, 2):
            seen.append(await spare_of(server, *seen))
            assert server.supervisor.spares() == (seen[-1],)
            os.kill(server.pid("b"), signal.SIGKILL)
            started = await server.event(event="worker_started", worker="b", epoch=epoch + 1)
            assert started["pid"] == seen[-1]
            await server.event(event="worker_ready", worker="b", epoch=epoch + 1)
            await server.tell("a", "saw", f"up probe/b@{epoch + 1}")
        seen.append(await spare_of(server, *seen))

    serve(tmp_path, names("a", "b"), scenario)
    assert len(dict.fromkeys(seen)) == 3
    assert all(gone(pid) for pid in seen)


def test_a_dead_spare_is_nobodys_replacement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spares, "_CALM_S", 0.05)

    async def scenario(server: Server) -> None:
        pid = await spare_of(server)
        handle = os.pidfd_open(pid)
        os.kill(pid, signal.SIGKILL)
        await trio.lowlevel.wait_readable(handle)
        os.close(handle)
        os.kill(server.pid("a"), signal.SIGKILL)
        started = await server.event(event="worker_started", worker="a", epoch=2)
        assert started["pid"] != pid
        await server.event(event="worker_ready", worker="a", epoch=2)

    serve(tmp_path, names("a"), scenario)


def test_a_dead_spare_is_reaped_and_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stayed a zombie, and the next death started a process anew."""
    monkeypatch.setattr(spares, "_CALM_S", 0.05)

    async def scenario(server: Server) -> None:
        pid = await spare_of(server)
        os.kill(pid, signal.SIGKILL)
        other = await spare_of(server, pid)
        assert server.supervisor.spares() == (other,)
        assert not Path(f"/proc/{pid}").exists(), "it is reaped"

    serve(tmp_path, names("a"), scenario)


@pytest.mark.parametrize("error", [errno.EAGAIN, errno.ENOMEM, errno.EMFILE])
def test_a_spare_that_cannot_be_started_ends_nothing_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    monkeypatch.setattr(spares, "_CALM_S", 0.05)
    failures = 3
    n_tried = 0

    def child(command: Sequence[str]) -> Child:
        """What fork raises at a limit, the first times that it is asked for a spare."""
        nonlocal n_tried
        if server_is_up:
            n_tried += 1
            if n_tried <= failures:
                raise OSError(error, os.strerror(error))
        return Child(command)

    server_is_up = False
    monkeypatch.setattr(spares, "Child", child)

    async def scenario(server: Server) -> None:
        await spare_of(server)
        assert n_tried == failures + 1
        assert [row.state for row in server.supervisor.table()] == ["up", "up"]

    def at_event(run_dir: Path, event: dict[str, str | int | float]) -> None:
        nonlocal server_is_up
        server_is_up = server_is_up or (event["event"] == "worker_ready" and event["worker"] == "b")

    serve(tmp_path, [*names("b", "a")], scenario, at_event=at_event)


def test_a_spare_that_hangs_costs_no_more_than_a_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It took the next life, and everyone waited for `ready_within_s`, two minutes."""
    monkeypatch.setattr(spares, "_CALM_S", 0.05)

    async def scenario(server: Server) -> None:
        pid = await spare_of(server)
        os.kill(pid, signal.SIGSTOP)
        os.kill(server.pid("a"), signal.SIGKILL)
        died = await server.event(event="worker_died", worker="a", epoch=2)
        assert "spare" in str(died["reason"]) or "stopped" in str(died["reason"])
        await server.event(event="worker_ready", worker="a", epoch=3)
        assert gone(pid)

    serve(tmp_path, names("a"), scenario, silent_s=3.0, max_restarts=1)


def test_a_worker_that_is_stopped_while_it_starts_is_replaced(tmp_path: Path) -> None:
    def at_event(run_dir: Path, event: dict[str, str | int | float]) -> None:
        if event["event"] == "worker_started" and event["epoch"] == 1:
            os.kill(int(event["pid"]), signal.SIGSTOP)

    async def scenario(server: Server) -> None:
        died = await server.event(event="worker_died", worker="a", epoch=1)
        assert str(died["reason"]).startswith("stopped for ")

    serve(tmp_path, names("a"), scenario, silent_s=3.0, max_restarts=0, at_event=at_event)
