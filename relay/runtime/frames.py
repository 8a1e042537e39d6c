"""What runs over sockets: 4-byte little-endian length, then MessagePack of a tagged union.

`Frame` is what two workers' links say to each other, `Control` what the supervisor and one worker say. A control frame that has `fd_names`
brings as many file descriptors with it (SCM_RIGHTS), in that order. Bytes that are no such frame raise msgspec.DecodeError.
"""

import struct
from typing import Annotated, TypeVar

import msgspec

from relay.errors import FrameTooLarge
from relay.messages import Address, Message

MAX_FRAME = 16 << 20
_LENGTH = struct.Struct("<I")


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """First frame of a connection, both ways: who I am, whose clock I read, and the last sequence number I have from you."""

    worker: str
    epoch: int
    clock_domain: str
    received: int


class Ack(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Receiver to sender: forget everything up to `received`."""

    received: int


class Deliver(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One message for one mailbox."""

    seq: int
    to: Address
    body: Message


class Credit(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The actor took `n` messages of this worker's lane."""

    seq: int
    to: Address
    n: Annotated[int, msgspec.Meta(ge=1)]


Frame = Hello | Ack | Deliver | Credit


class Start(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Supervisor to worker, once: who you are. `payload` is the composition's and opaque here."""

    worker: str
    epoch: int
    run_dir: str
    heartbeat_s: float
    link_deadline_s: float
    window: int
    fd_names: tuple[str, ...] = ()
    payload: bytes = b""


class Begun(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Worker to supervisor: I have my `Start`, and load. A process that waited as a spare says so at once, or it hangs."""


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Worker to supervisor: everything is loaded, these actors run and the link socket accepts. Limits count from here."""

    actors: tuple[str, ...]


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Worker to supervisor: the loop turns; `steps` the engine has ended, `step_age_s` of the one that runs (0: none runs)."""

    steps: int
    step_age_s: float


class Crashed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Worker to supervisor, last words: what ended it. `start_error`: starting again would not help."""

    reason: str
    start_error: bool = False


class WorkerUp(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Supervisor to workers: a worker is ready. Brings the descriptors it shares."""

    worker: str
    epoch: int
    actors: tuple[str, ...]
    fd_names: tuple[str, ...] = ()


class WorkerDown(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Supervisor to workers: the process has been reaped, so it writes no memory and sends nothing new. The rest as in `Down`."""

    worker: str
    epoch: int
    actors: tuple[str, ...]
    reason: str
    suspects: tuple[str, ...] = ()
    lone: bool = False


class Drain(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Supervisor to worker: finish and exit. `whole`: all others do too, and there will be no next life. `at_once`: what is unfinished ends
    in an error; that may come behind one without."""

    whole: bool = False
    at_once: bool = False


class Ask(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Worker to supervisor: ask everyone and answer by `deadline_s`. Supervisor to worker: answer with `Answer`."""

    ask_id: int
    kind: str
    body: bytes
    deadline_s: float


class Answer(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Worker to supervisor. `body` None: nothing to say to this kind. `failed`: there is something, and it could not be had."""

    ask_id: int
    body: bytes | None
    failed: bool = False


class Answers(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Supervisor to the worker that asked: worker to answer, and who should have answered and did not. "supervisor" is its own name."""

    ask_id: int
    answers: dict[str, bytes]
    silent: tuple[str, ...]


class Fault(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Worker to supervisor: the link to this life has been cut for longer than `link_deadline_s`."""

    worker: str
    epoch: int


class Leave(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Worker to supervisor: somebody sent me SIGTERM; have me drained."""


Control = Start | Begun | Ready | Heartbeat | Crashed | WorkerUp | WorkerDown | Drain | Ask | Answer | Answers | Fault | Leave

_encode = msgspec.msgpack.Encoder().encode
_frame_decoder = msgspec.msgpack.Decoder(Frame)
_control_decoder = msgspec.msgpack.Decoder(Control)
T = TypeVar("T")


def pack(frame: Frame | Control) -> bytes:
    """Raises FrameTooLarge rather than make what the peer must refuse."""
    body = _encode(frame)
    if len(body) > MAX_FRAME:
        raise FrameTooLarge(f"{type(frame).__name__} of {len(body)} bytes; a frame holds {MAX_FRAME} at most")
    return _LENGTH.pack(len(body)) + body


def decode_frame(body: bytes) -> Frame:
    return _decode(_frame_decoder, body)


def decode_control(body: bytes) -> Control:
    return _decode(_control_decoder, body)


def _decode(decoder: msgspec.msgpack.Decoder[T], body: bytes) -> T:
    try:
        return decoder.decode(body)
    except RecursionError as error:  # of deep nesting in a field that nobody knows; msgspec lets it through as it is
        raise msgspec.DecodeError(f"nested too deep: {error}") from error


class Reader:
    """Bytes in, whole bodies out. Not a generator: one left early would not have dropped what it had yielded."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes | bytearray) -> list[bytes]:
        """Raises FrameTooLarge; the stream is of no use afterwards."""
        buffer, at, bodies = self._buffer, 0, []
        buffer += data
        with memoryview(buffer) as view:
            while len(view) - at >= 4:
                (size,) = _LENGTH.unpack_from(view, at)
                if size > MAX_FRAME:
                    raise FrameTooLarge(f"a frame of {size} bytes was announced; the limit is {MAX_FRAME}")
                if len(view) - at - 4 < size:
                    break
                bodies.append(bytes(view[at + 4 : at + 4 + size]))
                at += 4 + size
        del buffer[:at]
        return bodies
