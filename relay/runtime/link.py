"""The road between two workers: frames over any trio stream that may be cut at any byte.

`LinkState` is the synchronous core: sequence numbers, what is not acknowledged yet, duplicates after a resend. `Link` is its shell:
`carry` is called with a new stream after each cut and goes on where the peer says it stopped. So between two lives of two workers messages
are neither lost, repeated nor reordered, and actors need to know only `Down`. What a peer sends that is no frame, or out of order, ends the
connection and not the worker.
"""

from collections import deque
from contextlib import suppress

import msgspec
import structlog
import trio

from relay.clock import clock_domain
from relay.errors import FrameTooLarge
from relay.messages import Address, Message
from relay.runtime.frames import Ack, Credit, Deliver, Frame, Hello, Reader, decode_frame, pack
from relay.runtime.node import Node

MAX_READ = 256 << 10
MAX_WRITE = 256 << 10
ACK_EVERY = 64
ACK_AFTER_S = 0.1  # what a quiet receiver owes so long: a one-way stream's sender keeps no more than that

_log = structlog.get_logger()


class LinkState:
    """Who has what, without I/O. Raises msgspec.ValidationError where the peer's numbers cannot be."""

    def __init__(self) -> None:
        self._seq = 0
        self._unsent: deque[tuple[int, bytes]] = deque()
        self._unacked: deque[tuple[int, bytes]] = deque()  # written to the present stream
        self.received = 0
        self._told = 0  # the last `received` that the peer was told

    @property
    def n_kept(self) -> int:
        return len(self._unsent) + len(self._unacked)

    @property
    def owes_ack(self) -> bool:
        return self.received > self._told

    @property
    def ack_due(self) -> bool:
        return self.received - self._told >= ACK_EVERY

    @property
    def next_seq(self) -> int:
        return self._seq + 1

    def keep(self, packed: bytes) -> None:
        """Take over the frame that was packed with `next_seq`."""
        self._seq += 1
        self._unsent.append((self._seq, packed))

    def acked(self, received: int) -> None:
        """The peer has everything up to `received`."""
        last_sent = self._seq - len(self._unsent)
        if received > last_sent:
            raise msgspec.ValidationError(f"acknowledged {received}, sent {last_sent}")
        while self._unacked and self._unacked[0][0] <= received:
            self._unacked.popleft()

    def restart(self, received: int) -> None:
        """A new stream: the peer has everything up to `received`, the rest goes again."""
        self._unacked += self._unsent
        self._unsent.clear()
        self.acked(received)
        if received < self._seq - len(self._unacked):
            raise msgspec.ValidationError(f"the peer has {received} and had acknowledged {self._seq - len(self._unacked)}")
        self._unsent, self._unacked = self._unacked, self._unsent

    def fresh(self, seq: int) -> bool:
        """Whether an arriving frame is new (and count it)."""
        if seq <= self.received:
            return False
        if seq != self.received + 1:
            raise msgspec.ValidationError(f"frame {seq} follows frame {self.received}")
        self.received = seq
        return True

    def chunk(self, *, ack: bool = False) -> bytes:
        """What to write next, about MAX_WRITE at most; empty when there is nothing. An owed Ack rides along, or goes alone if asked."""
        parts: list[bytes] = []
        if self.owes_ack and (ack or self.ack_due or self._unsent):
            self._told = self.received
            parts.append(pack(Ack(self.received)))
        size = 0
        while self._unsent and size < MAX_WRITE:
            kept = self._unsent.popleft()
            self._unacked.append(kept)
            size += len(kept[1])
            parts.append(kept[1])
        return b"".join(parts)


class Link:
    """One peer in one of its lives; the node's Outlet."""

    def __init__(self, node: Node, worker: str, epoch: int) -> None:
        self._node, self.worker, self.epoch = node, worker, epoch
        self._state = LinkState()
        self._wake, self._owing, self._flushed = trio.Event(), trio.Event(), trio.Event()
        self._flushed.set()
        self._quiet = False  # an Ack is to go out though nothing else does
        self._turn, self._newest, self._scope = trio.Lock(), 0, trio.CancelScope()
        self.connected = trio.Event()  # set while the peer's hello has been heard
        self.idle = trio.Event()  # set while no stream is carried: everything the peer wrote has been delivered
        self.idle.set()
        self.closed = False
        self.clock_domain = ""  # of the peer; time stamps of another domain than ours cannot be subtracted

    @property
    def n_kept(self) -> int:
        """Frames that the peer has not acknowledged."""
        return self._state.n_kept

    def deliver(self, to: Address, body: Message) -> None:
        self._keep(pack(Deliver(self._state.next_seq, to, body)))

    def credit(self, to: Address, n: int) -> None:
        self._keep(pack(Credit(self._state.next_seq, to, n)))

    async def flushed(self) -> None:
        """Return once everything is written to a stream: from there a Unix socket gives it to the peer though we end."""
        while not self._flushed.is_set():
            await self._flushed.wait()

    def cut(self) -> None:
        """Let go of the stream; it is for whoever carries the link to bring another."""
        self._scope.cancel()

    def close(self) -> None:
        """The peer is dead and read to the end: carry nothing any more."""
        self.closed = True
        self._scope.cancel()

    async def carry(self, stream: trio.abc.Stream, reader: Reader, hello: Hello | None = None) -> None:
        """Move frames both ways until the stream ends, and close it. `hello` is the peer's, if the acceptor has read it already.

        A second call ends the first: the peer's end of that stream is gone, and two writers would share out the frames between them.
        """
        self._newest += 1
        mine = self._newest
        self._scope.cancel()
        async with stream, self._turn:
            if self.closed or mine != self._newest:
                return
            with trio.CancelScope() as self._scope:
                self.idle = trio.Event()
                try:
                    await self._converse(stream, reader, hello)
                finally:
                    if self.connected.is_set():  # an event that somebody still waits on is not to be replaced
                        self.connected = trio.Event()
                    self.idle.set()

    async def _converse(self, stream: trio.abc.Stream, reader: Reader, hello: Hello | None) -> None:
        async with trio.open_nursery() as nursery:
            with suppress(trio.BrokenResourceError):  # a dead peer's last words are still in the socket
                await stream.send_all(pack(Hello(self._node.worker, self._node.epoch, clock_domain(), self._state.received)))
            try:
                if hello is not None:
                    self._on_hello(hello, stream, nursery)
                while data := await stream.receive_some(MAX_READ):
                    bodies = reader.feed(data)
                    for n, body in enumerate(
                        bodies, 1
                    ):  # one of a read at most is taken at once: behind a backlog, others have their turns
                        self._on_frame(decode_frame(body), stream, nursery, at_once=n == len(bodies))
            except trio.BrokenResourceError:
                pass  # a cut: `carry` is called again, or the supervisor says Down
            except (FrameTooLarge, msgspec.DecodeError) as error:
                _log.warning("link_garbage", peer=self.worker, epoch=self.epoch, error=str(error))
            nursery.cancel_scope.cancel()

    def _on_hello(self, hello: Hello, stream: trio.abc.Stream, nursery: trio.Nursery) -> None:
        if (hello.worker, hello.epoch) != (self.worker, self.epoch):
            raise msgspec.ValidationError(f"{hello.worker}@{hello.epoch} answers for {self.worker}@{self.epoch}")
        self._state.restart(hello.received)
        self.clock_domain = hello.clock_domain
        if self._state.n_kept:
            self._unflush()
        nursery.start_soon(self._write, stream)
        nursery.start_soon(self._ack_when_quiet)
        self.connected.set()

    def _on_frame(self, frame: Frame, stream: trio.abc.Stream, nursery: trio.Nursery, *, at_once: bool) -> None:
        match frame:
            case Hello() if not self.connected.is_set():
                self._on_hello(frame, stream, nursery)
            case Ack() if self.connected.is_set():
                self._state.acked(frame.received)
            case Deliver() if self.connected.is_set():
                if self._state.fresh(frame.seq):
                    self._node.delivered((self.worker, self.epoch), frame.to, frame.body, at_once=at_once)
                self._owe()
            case Credit() if self.connected.is_set():
                if self._state.fresh(frame.seq):
                    self._node.credited(frame.to, frame.n)
                self._owe()
            case _:
                raise msgspec.ValidationError(f"{type(frame).__name__} out of place")

    def _keep(self, packed: bytes) -> None:
        self._state.keep(packed)
        self._unflush()
        self._wake.set()

    def _unflush(self) -> None:
        if self._flushed.is_set():
            self._flushed = trio.Event()

    def _owe(self) -> None:
        if self._state.ack_due:
            self._wake.set()
        elif self._state.owes_ack:
            self._owing.set()

    async def _write(self, stream: trio.abc.Stream) -> None:
        """Until writing fails. That must not stop the reader: a dead peer's last words are still in the socket."""
        with suppress(trio.BrokenResourceError):
            while True:
                while chunk := self._state.chunk(ack=self._quiet):
                    self._quiet = False
                    await stream.send_all(chunk)
                self._flushed.set()
                self._wake = trio.Event()
                await self._wake.wait()

    async def _ack_when_quiet(self) -> None:
        """Costs one wake-up in ACK_AFTER_S under traffic, and none without."""
        while True:
            await self._owing.wait()
            await trio.sleep(ACK_AFTER_S)
            self._owing = trio.Event()
            if self._state.owes_ack:
                self._quiet = True
                self._wake.set()


async def read_hello(stream: trio.abc.Stream, reader: Reader) -> Hello | None:
    """The acceptor's first read; nothing follows before our own hello. None if the peer left. Raises FrameTooLarge, msgspec.DecodeError."""
    with suppress(trio.BrokenResourceError):
        while data := await stream.receive_some(MAX_READ):
            for body in reader.feed(data):
                frame = decode_frame(body)
                if not isinstance(frame, Hello):
                    raise msgspec.ValidationError(f"{type(frame).__name__} instead of a Hello")
                return frame
    return None
