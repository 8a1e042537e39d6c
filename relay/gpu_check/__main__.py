"""`scripts/gpu_check`: every section in turn, most important first, each written to the JSON file as it ends; a table last.

With `--only`, the file's other sections stay as they are, if they are of the same device.
Exit status: 0 all that must hold holds (a missed target is said, and fails nothing); 1 something does not; 2 what was asked for cannot be
done; 3 there is no GPU.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from relay.gpu_check.report import Found, from_json, table
from relay.gpu_check.section import MODULES

LIMITS_S: Final = {
    "device": 40,
    "kernels": 60,
    "sampling": 40,
    "graphs": 60,
    "ipc": 120,
    "decode": 110,
    "speed": 60,
    "transfer": 45,
    "server": 150,
}
IN_ALL_S: Final = 290.0
WRONG, NO_GPU = 2, 3
_LEAST_S: Final = 10.0


class Wrong(Exception):
    """What was asked for cannot be done."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/gpu_check", description=__doc__)
    parser.add_argument("--only", action="append", choices=list(MODULES)[1:], help="this section; may be given several times")
    parser.add_argument("--json", type=Path, default=Path("gpu_check.json"), help="where the findings go, section by section")
    parser.add_argument("--wheels", type=Path, help="a folder of wheels, for sections that need what is not installed")
    parser.add_argument("--rehearse", action="store_true", help="the same code on an emulated device, tiny: shows nothing of a GPU")
    given = parser.parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory() as site:
            if given.wheels is not None:
                _unpack(given.wheels, site)
            return check(given.only, given.json, site, rehearse=given.rehearse)
    except Wrong as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return WRONG


def check(only: Sequence[str] | None, place: Path, site: str, *, rehearse: bool) -> int:
    """only: these sections, beside those that the file has; None: all, and the file is made anew. Raises Wrong."""
    before = _before(place) if only else None
    _try_to_write(place)
    began, device = time.monotonic(), run_section("device", LIMITS_S["device"], site, rehearse=rehearse)
    found = [device]
    if device.status != "ok":
        if before is None:
            write(place, found, rehearse)
        there = device.status == "failed"
        print(f"gpu_check: {'the GPU cannot be checked' if there else 'there is no GPU to check'}: {device.note.strip()}", file=sys.stderr)
        return 1 if there else NO_GPU
    print(f"gpu_check: {device.note}", flush=True)
    kept = [] if before is None else _kept(before, place, device, rehearse)
    write(place, [*found, *kept], rehearse)
    for name in only or list(MODULES)[1:]:
        left = IN_ALL_S - (time.monotonic() - began)
        if left < _LEAST_S and not rehearse:
            found.append(Found(name, "skipped", note=f"no time left; run it with --only {name}"))
        else:
            limit = LIMITS_S[name] * (10 if rehearse else 1)
            found.append(run_section(name, limit if rehearse else min(left, limit), site, rehearse=rehearse))
        print(f"gpu_check: {name}: {found[-1].status} after {found[-1].seconds:.0f} s", flush=True)
        if found[-1].status == "failed":
            print(found[-1].note, file=sys.stderr, flush=True)
        kept = [section for section in kept if section.section != name]
        write(place, [*found, *kept], rehearse)
    print(table(found))
    failed = [section.section for section in found if section.status == "failed"]
    print(f"gpu_check: {'failed: ' + ', '.join(failed) if failed else 'all right'}, {time.monotonic() - began:.0f} s, {place}")
    return 1 if failed else 0


def _unpack(wheels: Path, site: str) -> None:
    found = sorted(wheels.glob("*.whl"))
    if not found:
        raise Wrong(f"--wheels {wheels}: there is no folder with wheels in it")
    for wheel in found:
        try:
            zipfile.ZipFile(wheel).extractall(site)
        except (OSError, zipfile.BadZipFile) as error:
            raise Wrong(f"--wheels {wheels}: {wheel.name} cannot be unpacked: {error}") from error


def _try_to_write(place: Path) -> None:
    """Now, and not when there is something to lose. What is there stays."""
    new = not place.exists()
    try:
        place.open("a", encoding="utf-8").close()
    except OSError as error:
        raise Wrong(f"--json {place} cannot be written: {error.strerror}") from error
    if new:
        place.unlink()


def _before(place: Path) -> tuple[bool, list[Found]] | None:
    """What the file has: whether of a rehearsal, and the sections; None if it is not there."""
    try:
        data = json.loads(place.read_text(encoding="utf-8"))
        return bool(data["rehearsal"]), [from_json(section) for section in data["sections"]]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Wrong(f"--json {place} is there and no file of gpu_check's, so nothing is added to it; name another") from error


def _kept(before: tuple[bool, list[Found]], place: Path, device: Found, rehearse: bool) -> list[Found]:
    """All but the device's own. Raises Wrong if they are another's."""
    rehearsed, sections = before
    notes = [section.note for section in sections if section.section == device.section]
    if rehearsed != rehearse or notes != [device.note]:
        whose = "a rehearsal" if rehearsed else ", ".join(notes) or "no device"
        raise Wrong(f"--json {place} has findings of {whose}, so nothing is added to it; name another")
    return [section for section in sections if section.section != device.section]


def run_section(name: str, limit_s: float, site: str, *, rehearse: bool) -> Found:
    """In a process of its own; what it wrote on standard error is its note where it came to no end."""
    command = [sys.executable, "-m", "relay.gpu_check.section", name, *(["--rehearse"] if rehearse else [])]
    paths = [path for path in (site, os.environ.get("PYTHONPATH", "")) if path]  # for what it starts, too
    environment, started = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}, time.monotonic()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    ) as process:
        late = ""
        try:
            out, err = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # and what it started
            out, err = process.communicate()
            late = f"it did not end in {limit_s:.0f} s"
    found = _last(out) or Found(name)
    if late or process.returncode not in (0, 1) or not out:
        why = late or f"its process ended with {process.returncode}\n{err[-4000:]}"
        found.status, found.seconds, found.note = "failed", time.monotonic() - started, why
    return found


def _last(out: str) -> Found | None:
    """What its last whole line says."""
    for line in reversed(out.splitlines()):
        try:
            return from_json(json.loads(line))
        except (ValueError, KeyError, TypeError):
            continue
    return None


def write(place: Path, found: Sequence[Found], rehearse: bool) -> None:
    """In the order of a whole run."""
    order = list(MODULES)
    sections = [section.to_json() for section in sorted(found, key=lambda section: order.index(section.section))]
    place.write_text(json.dumps({"rehearsal": rehearse, "sections": sections}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
