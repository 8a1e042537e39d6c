"""A worker's links to all the others: accepts and makes connections in the run directory, keeps the descriptors that peers share.

In: `up` and `down`, the supervisor's word. Out: the same to the node, and `Fault` to the supervisor for a link that stays cut. Of two
workers the one whose name sorts first connects. An end of file is never a death here: the link waits and is carried again.
"""

import math
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path

import msgspec
import structlog
import trio

from relay.errors import FrameTooLarge
from relay.messages import Address
from relay.runtime.control import close_all
from relay.runtime.frames import Fault, Reader, WorkerDown, WorkerUp
from relay.runtime.link import Link, read_hello
from relay.runtime.mailbox import Life
from relay.runtime.node import Node

_RETRY_S = 0.05
_HELLO_WITHIN_S = 5.0  # a peer may know of us before we know of it
_LAST_WORDS_S = 1.0  # end of file is certain after a death unless somebody inherited the socket
_log = structlog.get_logger()


def socket_name(worker: str, epoch: int) -> str:
    """One for each life, so that a new one never meets the old one's file."""
    return f"{worker}.{epoch}.sock"


class Peers:
    def __init__(self, node: Node, run_dir: Path, *, link_deadline_s: float, report: Callable[[Fault], None]) -> None:
        self._node, self._deadline_s, self._report = node, link_deadline_s, report
        self._dir_fd = os.open(run_dir, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._links: dict[Life, Link] = {}
        self._fds: dict[Life, dict[str, int]] = {}
        self._homes: dict[Address, Life] = {}
        self._changed = trio.Event()
        self._cut_until = -math.inf

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; started once connections are accepted."""
        try:
            with trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
                await sock.bind(self._path(self._node.worker, self._node.epoch))
                sock.listen(64)
                async with trio.open_nursery() as self._nursery:
                    await self._nursery.start(trio.serve_listeners, self._on_stream, [trio.SocketListener(sock)])
                    task_status.started()
        finally:
            os.close(self._dir_fd)
            for life in list(self._fds):
                self._close_fds(life)

    def up(self, up: WorkerUp, fds: dict[str, int]) -> None:
        """Takes over the descriptors."""
        life = up.worker, up.epoch
        self._fds[life] = fds
        self._homes.update({Address(actor, up.epoch): life for actor in up.actors})
        if up.worker == self._node.worker:
            self._node.up(up.worker, up.epoch, up.actors)
            return
        link = self._links[life] = Link(self._node, *life)
        self._node.up(up.worker, up.epoch, up.actors, link)
        if self._node.worker < up.worker:
            self._nursery.start_soon(self._connect, link)
            self._nursery.start_soon(self._report_cut, link)
        self._changed.set()
        self._changed = trio.Event()

    def down(self, down: WorkerDown) -> None:
        self._nursery.start_soon(self._bury, down)

    def fds(self, address: Address) -> dict[str, int]:
        return dict(self._fds.get(self._homes.get(address, ("", 0)), {}))

    def cut(self, seconds: float) -> None:
        """For chaos tests: break every link, and keep it broken for a while. Nothing is lost by it, only late."""
        self._cut_until = trio.current_time() + seconds
        for link in self._links.values():
            link.cut()

    async def flushed(self) -> None:
        """Return once all that was posted is written to the peers' sockets."""
        for link in list(self._links.values()):
            await link.flushed()

    async def _bury(self, down: WorkerDown) -> None:
        """The process is gone; what it wrote may still lie in our socket, and is delivered before the news."""
        life = down.worker, down.epoch
        if life in self._links:
            link = self._links.pop(life)
            with trio.move_on_after(_LAST_WORDS_S):
                await link.idle.wait()
            link.close()
        self._close_fds(life)
        for address in [a for a, home in self._homes.items() if home == life]:
            del self._homes[address]
        self._node.down(down.worker, down.epoch, down.reason, down.actors, suspects=down.suspects, lone=down.lone)

    def _close_fds(self, life: Life) -> None:
        close_all(self._fds.pop(life, {}).values())

    def _path(self, worker: str, epoch: int) -> str:
        """A socket's path has 107 bytes and a run directory may need more: this way it takes none."""
        return f"/proc/self/fd/{self._dir_fd}/{socket_name(worker, epoch)}"

    async def _connect(self, link: Link) -> None:
        while not link.closed:
            await trio.sleep_until(self._cut_until)
            try:
                stream = await trio.open_unix_socket(self._path(link.worker, link.epoch))
            except OSError as error:
                _log.debug("link_connect_failed", peer=link.worker, epoch=link.epoch, error=str(error))
            else:
                await link.carry(stream, Reader())
            await trio.sleep(_RETRY_S)

    async def _report_cut(self, link: Link) -> None:
        """Only the connecting side reports, and again after each further deadline: which side is fenced is the supervisor's choice."""
        while not link.closed:
            with trio.move_on_after(self._deadline_s):
                await link.connected.wait()
            if link.connected.is_set():
                await link.idle.wait()
            elif not link.closed:
                _log.warning("link_cut", peer=link.worker, epoch=link.epoch, for_s=self._deadline_s)
                self._report(Fault(worker=link.worker, epoch=link.epoch))

    async def _on_stream(self, stream: trio.SocketStream) -> None:
        async with stream:
            await trio.sleep_until(self._cut_until)
            _, uid, _ = struct.unpack("3i", stream.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
            if uid != os.geteuid():
                _log.warning("link_refused", uid=uid)
                return
            reader, found = Reader(), None
            with trio.move_on_after(_HELLO_WITHIN_S):
                try:
                    hello = await read_hello(stream, reader)
                except (FrameTooLarge, msgspec.DecodeError) as error:
                    _log.warning("link_garbage", peer="not known yet", error=str(error))
                    return
                if hello is None:
                    return
                while (found := self._links.get((hello.worker, hello.epoch))) is None:
                    await self._changed.wait()
            if found is not None and hello is not None:
                await found.carry(stream, reader, hello)
