"""The socket pair between the supervisor and one worker: control frames and file descriptors; end of file means the other is dead.

`ControlChannel` is either end. `Outbox` is a bounded queue before it with a task that writes, so that nobody ever waits for a hung reader.
"""

import array
import os
import socket
from collections import deque
from collections.abc import Iterable, Mapping

import msgspec
import trio

from relay.errors import RuntimeFault
from relay.runtime.frames import Control, Reader, Start, WorkerUp, decode_control, pack

MAX_FDS = 128  # the kernel passes at most 253 with one message
_READ = 64 << 10


def _fd_names(frame: Control) -> tuple[str, ...]:
    return frame.fd_names if isinstance(frame, Start | WorkerUp) else ()


def close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


class ControlChannel:
    """Takes over the socket."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = trio.socket.from_stdlib_socket(sock)
        self._reader, self._bodies = Reader(), deque[bytes]()
        self._fds: deque[int] = deque()  # arrived, and not yet claimed by the frame that they came with
        self._turn, self._broken = trio.Lock(), False

    async def send(self, packed: bytes, fds: tuple[int, ...] = ()) -> None:
        """Write one frame; the descriptors stay the caller's. Raises trio.BrokenResourceError when the other side is dead.

        Cancelled in the middle of a frame, the channel is broken: nothing that follows could be read.
        """
        data = memoryview(packed)
        async with self._turn:  # two tasks in one socket's send would be a BusyResourceError
            if self._broken:
                raise trio.BrokenResourceError("an earlier frame was left unfinished")
            try:
                if fds:
                    passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
                    sent = await self._sock.sendmsg([data], passed)
                else:
                    sent = await self._sock.send(data)
                self._broken = True
                while sent < len(data):
                    sent += await self._sock.send(data[sent:])
                self._broken = False
            except OSError as error:
                raise trio.BrokenResourceError(str(error)) from error

    async def receive(self) -> tuple[Control, dict[str, int]] | None:
        """The next frame and the descriptors it brought, now the caller's; None at the end of file.

        Raises msgspec.DecodeError or FrameTooLarge for garbage, RuntimeFault where descriptors were lost.
        """
        while not self._bodies:
            try:
                data, ancillary, flags, _ = await self._sock.recvmsg(_READ, socket.CMSG_SPACE(4 * MAX_FDS), socket.MSG_CMSG_CLOEXEC)
            except ConnectionResetError:
                return None
            for level, kind, payload in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    self._fds.extend(array.array("i", payload[: len(payload) // 4 * 4]))
            if flags & socket.MSG_CTRUNC:
                raise RuntimeFault("file descriptors were lost on the way: raise the limit of open files (ulimit -n)")
            if not data:
                return None
            self._bodies.extend(self._reader.feed(data))
        frame = decode_control(self._bodies.popleft())
        names = _fd_names(frame)
        if len(names) > len(self._fds):
            raise msgspec.ValidationError(f"{type(frame).__name__} came with {len(self._fds)} of {len(names)} file descriptors")
        return frame, {name: self._fds.popleft() for name in names}

    def close(self) -> None:
        self._sock.close()
        close_all(self._fds)
        self._fds.clear()


class Outbox:
    """Frames on their way into a channel. `limit` that the reader did not take in time is a sign that it hangs."""

    def __init__(self, channel: ControlChannel, *, limit: int = 1024) -> None:
        self._channel, self._limit = channel, limit
        self._queue: deque[tuple[bytes, tuple[int, ...]]] = deque()
        self._wake, self._closed = trio.Event(), False

    def put(self, frame: Control, fds: Mapping[str, int] | None = None, *, spare: bool = False) -> bool:
        """False if there is no room; a `spare` frame, which may be lost, uses the first half only. Raises FrameTooLarge.

        To a reader that is dead already, everything is dropped.

        `fds` must hold what the frame's `fd_names` name; they are duplicated here, so their owner may close them at once.
        """
        if self._closed:
            return True
        packed = pack(frame)
        if len(self._queue) >= (self._limit // 2 if spare else self._limit):
            return False
        self._queue.append((packed, tuple(os.dup((fds or {})[name]) for name in _fd_names(frame))))
        self._wake.set()
        return True

    async def run(self) -> None:
        """Write until cancelled; once the reader is dead, just drop."""
        try:
            while True:
                while self._queue:
                    packed, fds = self._queue.popleft()
                    try:
                        await self._channel.send(packed, fds)
                    finally:
                        close_all(fds)
                self._wake = trio.Event()
                await self._wake.wait()
        except trio.BrokenResourceError:
            pass  # end of file, or the pidfd, tells whoever reads this channel
        finally:
            self.close()

    def close(self) -> None:
        """Drop what is not written, and all that follows."""
        self._closed = True
        while self._queue:
            close_all(self._queue.popleft()[1])
