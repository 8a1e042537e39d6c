"""A dead worker is replaced by a process that is there already, if that one still lives; and no spare is left behind."""

import os
import signal
from pathlib import Path

import pytest
import trio

from relay.runtime import spares
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
