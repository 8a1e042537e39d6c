"""What an engine writes down before each step, where it survives the process: the requests in it.

A page of shared memory that the root holds. After a death that nobody wanted, the root reads who was being computed: one of them may be
what killed the worker. Nothing is on it between steps, unless the next one has begun with the same requests.
"""

import mmap
import os
import struct

import msgspec

BOARD_BYTES = 64 << 10
_LENGTH = struct.Struct("<I")


class _Notice(msgspec.Struct, array_like=True):
    request_ids: list[str]
    lone: bool


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Notice).decode


class StepBoard:
    """The writer's side. Takes over the descriptor."""

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, BOARD_BYTES)
        os.close(fd)
        _LENGTH.pack_into(self._map, 0, 0)

    def begin(self, request_ids: list[str], lone: bool) -> None:
        """A step of these begins. `lone`: of a single one, to see whether it is what kills. Ids that find no room are left out."""
        data = _encode(_Notice(request_ids, lone))
        while len(data) > BOARD_BYTES - _LENGTH.size:
            request_ids = request_ids[: len(request_ids) // 2]
            data = _encode(_Notice(request_ids, lone))
        self._map[_LENGTH.size : _LENGTH.size + len(data)] = data
        _LENGTH.pack_into(self._map, 0, len(data))

    def end(self) -> None:
        _LENGTH.pack_into(self._map, 0, 0)


def read_board(fd: int) -> tuple[tuple[str, ...], bool]:
    """Who was in the step that its writer died in; nobody between steps, or if it died as it wrote. The descriptor stays the caller's."""
    data = os.pread(fd, BOARD_BYTES, 0)
    (size,) = _LENGTH.unpack_from(data)
    if not 0 < size <= BOARD_BYTES - _LENGTH.size:
        return (), False
    try:
        notice = _decode(data[_LENGTH.size : _LENGTH.size + size])
    except msgspec.DecodeError:
        return (), False
    return tuple(notice.request_ids), notice.lone
