"""A worker's side of its links over real sockets; the test plays the peer, byte by byte."""

import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from relay.messages import Address, Down, Message, Refused, Up
from relay.runtime.frames import Deliver, Fault, Frame, Hello, Reader, WorkerDown, WorkerUp, decode_frame, pack
from relay.runtime.node import Context, Node
from relay.runtime.peers import Peers, socket_name

DOWN = WorkerDown(worker="peer", epoch=1, actors=("x",), reason="killed")
X = Address("x", 1)


def mail(n: int) -> Refused:
    return Refused(request_id="r", attempt=n, code="overloaded", message="")


class Us:
    """The worker under test, `me`'s mailbox, and what it reported."""

    def __init__(self, run_dir: Path, worker: str, deadline_s: float) -> None:
        self.run_dir, self.node = run_dir, Node(worker, 1)
        self.me: Context = self.node.open("me")
        self.reports: list[Fault] = []
        self.reported = trio.Event()
        self.peers = Peers(self.node, run_dir, link_deadline_s=deadline_s, report=self._report)

    def _report(self, fault: Fault) -> None:
        self.reports.append(fault)
        self.reported.set()

    def meet_peer(self, fds: dict[str, int] | None = None, *, epoch: int = 1) -> None:
        self.peers.up(WorkerUp(worker="peer", epoch=epoch, actors=("x",)), fds or {})

    async def connect(self) -> trio.SocketStream:
        return await trio.open_unix_socket(self.run_dir / socket_name(self.node.worker, 1))

    async def take(self, n: int) -> list[Message]:
        return [await anext(self.me.inbox) for _ in range(n)]


def run(path: Path, worker: str, scenario: Callable[[Us], Awaitable[None]], *, deadline_s: float = 60.0) -> None:
    """A worker whose name sorts behind "peer" accepts; one that sorts before it connects."""

    async def main() -> None:
        us = Us(path, worker, deadline_s)
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                await nursery.start(us.peers.run)
                await scenario(us)
                nursery.cancel_scope.cancel()

    trio.run(main)


async def frames(stream: trio.SocketStream, n: int) -> list[Frame]:
    reader, found = Reader(), list[Frame]()
    while len(found) < n and (data := await stream.receive_some()):
        found += [decode_frame(body) for body in reader.feed(data)]
    return found


def test_a_peer_that_comes_back_goes_on_where_it_stopped(tmp_path: Path) -> None:
    async def scenario(us: Us) -> None:
        us.meet_peer()
        for received, sent in ((0, (1, 2)), (2, (2, 3)), (3, (4,))):
            async with await us.connect() as stream:
                await stream.send_all(pack(Hello("peer", 1, "clock", 0)))
                (hello,) = await frames(stream, 1)
                assert isinstance(hello, Hello)
                assert (hello.worker, hello.epoch, hello.received) == ("worker", 1, received)
                assert hello.clock_domain
                await stream.send_all(b"".join(pack(Deliver(n, us.me.address, mail(n))) for n in sent))
                while len(us.me.inbox) < 1 + sent[-1]:
                    await trio.sleep(0)
        assert await us.take(5) == [Up(address=X), mail(1), mail(2), mail(3), mail(4)]

    run(tmp_path, "worker", scenario)


def test_last_words_come_before_the_news_of_the_death(tmp_path: Path) -> None:
    async def scenario(us: Us) -> None:
        for epoch in range(1, 11):  # which task runs first is left to chance
            us.meet_peer(epoch=epoch)
            us.me.monitor(Address("x", epoch))
            async with await us.connect() as stream:
                await stream.send_all(pack(Hello("peer", epoch, "", 0)))
                await frames(stream, 1)
                os.write(stream.socket.fileno(), b"".join(pack(Deliver(n, us.me.address, mail(n))) for n in (1, 2, 3)))
                us.peers.down(WorkerDown(worker="peer", epoch=epoch, actors=("x",), reason="killed"))
            x = Address("x", epoch)
            assert await us.take(5) == [Up(address=x), mail(1), mail(2), mail(3), Down(address=x, reason="killed")]

    run(tmp_path, "worker", scenario)


def test_a_peer_that_knows_of_us_first_is_waited_for(tmp_path: Path) -> None:
    async def scenario(us: Us) -> None:
        async with await us.connect() as stream:
            await stream.send_all(pack(Hello("peer", 1, "", 0)))
            await wait_all_tasks_blocked(0.05)
            us.meet_peer()
            await frames(stream, 1)
            await stream.send_all(pack(Deliver(1, us.me.address, mail(1))))
            assert await us.take(2) == [Up(address=X), mail(1)]

    run(tmp_path, "worker", scenario)


def test_another_users_process_is_turned_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(us: Us) -> None:
        us.meet_peer()
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        async with await us.connect() as stream:
            await stream.send_all(pack(Hello("peer", 1, "", 0)))
            with suppress(trio.BrokenResourceError):  # a socket that is closed with our hello unread
                assert await stream.receive_some() == b"", "it said hello"

    run(tmp_path, "worker", scenario)


def test_a_link_that_is_not_made_in_time_is_reported_until_it_is(tmp_path: Path) -> None:
    async def scenario(us: Us) -> None:
        us.meet_peer()
        for _ in range(2):
            us.reported = trio.Event()
            await us.reported.wait()
        assert us.reports[0] == Fault(worker="peer", epoch=1)
        us.peers.down(DOWN)
        assert await us.take(1) == [Up(address=X)]

    run(tmp_path, "a worker", scenario, deadline_s=0.05)


def test_the_connecting_side_comes_again_and_again(tmp_path: Path) -> None:
    async def scenario(us: Us) -> None:
        with trio.socket.socket(trio.socket.AF_UNIX) as sock:
            await sock.bind(str(tmp_path / socket_name("peer", 1)))
            sock.listen()
            us.meet_peer()
            us.me.post(X, mail(1))
            for received, expected in ((0, [1]), (0, [1, 2]), (1, [2])):
                accepted, _ = await sock.accept()
                async with trio.SocketStream(accepted) as stream:
                    assert isinstance((await frames(stream, 1))[0], Hello)
                    await stream.send_all(pack(Hello("peer", 1, "", received)))
                    sent = await frames(stream, len(expected))
                    assert [frame.seq for frame in sent if isinstance(frame, Deliver)] == expected
                if received == 0 and expected == [1]:
                    us.me.post(X, mail(2))

    run(tmp_path, "a worker", scenario)


def test_shared_descriptors_are_there_while_their_worker_lives(tmp_path: Path) -> None:
    async def scenario(us: Us) -> None:
        fd = os.memfd_create("pool")
        us.meet_peer({"pool": fd})
        us.me.monitor(X)
        assert us.peers.fds(X) == {"pool": fd}
        assert us.peers.fds(Address("x", 2)) == {}
        us.peers.down(DOWN)
        assert (await us.take(2))[1] == Down(address=X, reason="killed")
        assert us.peers.fds(X) == {}
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)

    run(tmp_path, "worker", scenario)
