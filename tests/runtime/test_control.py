"""The control channel: frames with descriptors over a real socket pair, garbage, a reader that hangs."""

import os
import socket
from collections.abc import Awaitable, Callable

import msgspec
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from relay.errors import FrameTooLarge
from relay.runtime.control import ControlChannel, Outbox
from relay.runtime.frames import Drain, Heartbeat, WorkerDown, WorkerUp, pack

DOWN = WorkerDown(worker="a", epoch=1, actors=("x",), reason="y" * 100_000)


def run(scenario: Callable[[ControlChannel, ControlChannel], Awaitable[None]]) -> None:
    async def main() -> None:
        left, right = socket.socketpair()
        ours, theirs = ControlChannel(left), ControlChannel(right)
        with trio.fail_after(60):
            await scenario(ours, theirs)
        ours.close()
        theirs.close()

    trio.run(main)


def test_descriptors_come_with_their_frame_and_are_not_inherited() -> None:
    async def scenario(ours: ControlChannel, theirs: ControlChannel) -> None:
        outbox = Outbox(ours)
        for epoch in (1, 2):
            fds = {name: os.memfd_create(name) for name in ("p", "q")}
            for name, fd in fds.items():
                os.write(fd, f"{name}{epoch}".encode())
            outbox.put(Heartbeat(steps=epoch, step_age_s=0.0))
            outbox.put(WorkerUp(worker="a", epoch=epoch, actors=(), fd_names=("q", "p")), fds)
            for fd in fds.values():
                os.close(fd)  # the queue has its own
        async with trio.open_nursery() as nursery:
            nursery.start_soon(outbox.run)
            for epoch in (1, 2):
                assert await theirs.receive() == (Heartbeat(steps=epoch, step_age_s=0.0), {})
                received = await theirs.receive()
                assert received is not None
                frame, fds = received
                assert isinstance(frame, WorkerUp)
                assert {name: os.pread(fd, 9, 0) for name, fd in fds.items()} == {"q": b"q%d" % epoch, "p": b"p%d" % epoch}
                assert not any(os.get_inheritable(fd) for fd in fds.values())
                for fd in fds.values():
                    os.close(fd)
            nursery.cancel_scope.cancel()

    run(scenario)


def test_a_frame_without_its_descriptors_is_garbage() -> None:
    async def scenario(ours: ControlChannel, theirs: ControlChannel) -> None:
        await ours.send(pack(WorkerUp(worker="a", epoch=1, actors=(), fd_names=("pool",))))
        with pytest.raises(msgspec.ValidationError, match="0 of 1"):
            await theirs.receive()

    run(scenario)


@pytest.mark.parametrize(("garbage", "error"), [(b"\xff" * 8, FrameTooLarge), (b"\x01\x00\x00\x00\xc1", msgspec.DecodeError)])
def test_garbage_is_an_error_and_not_a_frame(garbage: bytes, error: type[Exception]) -> None:
    async def scenario(ours: ControlChannel, theirs: ControlChannel) -> None:
        await ours.send(garbage)
        with pytest.raises(error):
            await theirs.receive()

    run(scenario)


def test_end_of_file_comes_after_what_was_said() -> None:
    async def scenario(ours: ControlChannel, theirs: ControlChannel) -> None:
        await ours.send(pack(Drain()))
        ours.close()
        assert await theirs.receive() == (Drain(), {})
        assert await theirs.receive() is None
        with pytest.raises(trio.BrokenResourceError):
            await theirs.send(pack(DOWN))

    run(scenario)


def test_a_hung_reader_blocks_nobody_and_is_found_out() -> None:
    async def scenario(ours: ControlChannel, theirs: ControlChannel) -> None:
        outbox = Outbox(ours, limit=8)
        fd = os.memfd_create("pool")
        up = WorkerUp(worker="a", epoch=1, actors=(), fd_names=("pool",))
        before = len(os.listdir("/proc/self/fd"))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(outbox.run)
            outbox.put(DOWN)
            outbox.put(DOWN)
            outbox.put(DOWN)
            await wait_all_tasks_blocked(0.01)
            n_spare = sum(outbox.put(Heartbeat(steps=0, step_age_s=0.0), spare=True) for _ in range(9))
            n_must = sum(outbox.put(up, {"pool": fd}) for _ in range(9))
            nursery.cancel_scope.cancel()
        assert 0 < n_spare <= 4
        assert n_must == 4
        assert outbox.put(up, {"pool": fd}), "to the dead, everything is dropped"
        assert len(os.listdir("/proc/self/fd")) == before, "descriptors in the queue are closed"
        with pytest.raises(trio.BrokenResourceError):
            await ours.send(pack(Drain()))  # in the middle of a frame there is no place for another
        os.close(fd)

    run(scenario)
