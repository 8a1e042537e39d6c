"""A file that must have a given sha256, hashed once while it does not change.

A file that was hashed leaves a record with its size and time of change, and is not hashed again while those stay.
"""

import contextlib
import hashlib
import os
from pathlib import Path
from typing import Final

import msgspec

from relay.errors import SourceError
from relay.model.progress import Progress

CHUNK: Final = 1 << 20


class _Record(msgspec.Struct, frozen=True):
    """What a file was when it was hashed."""

    size: int
    mtime_ns: int
    sha256: str


def check(path: Path, sha256: str | None, record: Path, report: Progress) -> None:
    """The file must have this sha256. What the record says of an unchanged file is believed."""
    if sha256 is None:
        return
    stat = path.stat()
    known = _read_record(record)
    if known is not None and (known.size, known.mtime_ns) == (stat.st_size, stat.st_mtime_ns):
        found = known.sha256
    else:
        found = _hash(path, stat.st_size, report)
        with contextlib.suppress(OSError):  # without a record the next start hashes again, and that is all
            write_record(record, path, found)
    if found != sha256:
        raise SourceError(
            f"{path} has sha256 {found}, expected {sha256}. Correct model.sha256, or put the right file there; "
            "a fetched file that is deleted is fetched again"
        )


def _hash(path: Path, size: int, report: Progress) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
            report("checking", file.tell(), size)
    return digest.hexdigest()


def _read_record(record: Path) -> _Record | None:
    try:
        return msgspec.json.decode(record.read_bytes(), type=_Record)
    except (OSError, msgspec.DecodeError):
        return None


def write_record(record: Path, path: Path, sha256: str) -> None:
    record.parent.mkdir(parents=True, exist_ok=True)
    stat = path.stat()
    part = record.with_name(f"{record.name}.{os.getpid()}")
    part.write_bytes(msgspec.json.encode(_Record(stat.st_size, stat.st_mtime_ns, sha256)))
    os.replace(part, record)
