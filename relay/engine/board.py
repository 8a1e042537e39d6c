"""What an engine writes down before each step, where it survives the process: the requests in it.

A page of shared memory that the root holds. After a death that nobody wanted, the root reads who was being computed: one of them may be
what killed the worker. Nothing is on it between steps, unless the next one has begun with the same requests. A kill that is announced here
(one that a chaos test is about to strike) convicts nobody.
"""

import mmap
import os
import struct

import msgspec

BOARD_BYTES = 64 << 10
_HEADER = struct.Struct("<I?")  # bytes of the notice, and whether a kill is announced


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
        self._announced = False
        self._set(0)

    def begin(self, request_ids: list[str], lone: bool) -> None:
        """A step of these begins. `lone`: of a single one, to see whether it is what kills. Ids that find no room are left out."""
        data = _encode(_Notice(request_ids, lone))
        while len(data) > BOARD_BYTES - _HEADER.size:
            request_ids = request_ids[: len(request_ids) // 2]
            data = _encode(_Notice(request_ids, lone))
        self._map[_HEADER.size : _HEADER.size + len(data)] = data
        self._set(len(data))

    def end(self) -> None:
        self._set(0)

    def announce_kill(self) -> None:
        """This process will be killed, and none of its requests is why: whoever is in a step then is suspected, but not convicted."""
        self._announced = True
        self._map[_HEADER.size - 1] = True

    def _set(self, n_bytes: int) -> None:
        _HEADER.pack_into(self._map, 0, n_bytes, self._announced)


def read_board(fd: int) -> tuple[tuple[str, ...], bool]:
    """Who was in the step that its writer died in; nobody between steps, or if it died as it wrote. The descriptor stays the caller's."""
    data = os.pread(fd, BOARD_BYTES, 0)
    size, announced = _HEADER.unpack_from(data)
    if not 0 < size <= BOARD_BYTES - _HEADER.size:
        return (), False
    try:
        notice = _decode(data[_HEADER.size : _HEADER.size + size])
    except msgspec.DecodeError:
        return (), False
    return tuple(notice.request_ids), notice.lone and not announced
