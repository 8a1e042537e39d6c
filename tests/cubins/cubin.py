"""What a cubin says of its kernels, read from its ELF sections and from nvdisasm: nothing is taken from the compiler's word.

    resources(cubin) -> {kernel: Resources(registers, shared, stack)}         shared: static bytes
    instructions(path) -> {kernel: Counter of opcodes with their modifiers}   needs the package nvidia-cuda-nvdisasm

Attributes are records in `.nv.info` sections: format, number, and a symbol and a value where the format is 4. Source of the numbers: the
CUDA binary utilities' own dumps.
"""

import re
import struct
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.cubins.toolkit import tool

_STACK, _REGISTERS = 0x12, 0x2F
_SIZED: Final = 4  # the format of a record with a length
_RESERVED_SHARED: Final = 1024  # the first bytes of a block's shared memory are the system's, from sm_90 on in the section's size
_OPCODE: Final = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P[0-9T]+ )?([A-Z][A-Z0-9_.]*)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Resources:
    """Of one kernel. registers: of a thread; shared: static bytes of a block; stack: bytes of a thread, 0 where nothing spills."""

    registers: int
    shared: int
    stack: int


@dataclass(frozen=True, slots=True)
class _Section:
    name: str
    size: int
    content: bytes


def resources(cubin: bytes, architecture: int) -> dict[str, Resources]:
    sections = _sections(cubin)
    names = _symbol_names(sections)
    values: dict[int, dict[str, int]] = {_STACK: {}, _REGISTERS: {}}
    for number, symbol, value in _records(next(s.content for s in sections if s.name == ".nv.info")):
        if number in values:
            values[number][names[symbol]] = value
    shared = {s.name.removeprefix(".nv.shared."): s.size for s in sections if s.name.startswith(".nv.shared.")}
    reserved = _RESERVED_SHARED if architecture >= 90 else 0
    kernels = [s.name.removeprefix(".text.") for s in sections if s.name.startswith(".text.")]
    return {k: Resources(values[_REGISTERS][k], max(0, shared.get(k, 0) - reserved), values[_STACK][k]) for k in kernels}


def instructions(path: Path) -> dict[str, Counter[str]]:
    text = subprocess.run([tool("nvdisasm"), "-c", str(path)], capture_output=True, text=True, check=True).stdout
    found = {}
    for part in re.split(r"^\s*\.section\s+\.text\.", text, flags=re.MULTILINE)[1:]:
        found[part[: part.index(",")]] = Counter(_OPCODE.findall(part))
    return found


def _sections(cubin: bytes) -> list[_Section]:
    offset, n, names_at = struct.unpack_from("<Q10xHH", cubin, 0x28)[0], *struct.unpack_from("<HH", cubin, 0x3C)
    heads = [struct.unpack_from("<IIQQQQ", cubin, offset + 64 * i) for i in range(n)]  # name, type, flags, address, offset, size
    names = cubin[heads[names_at][4] : heads[names_at][4] + heads[names_at][5]]
    return [
        _Section(_text(names, name), size, b"" if kind == 8 else cubin[at : at + size])  # 8: takes no place in the file
        for name, kind, _, _, at, size in heads
    ]


def _symbol_names(sections: list[_Section]) -> list[str]:
    table = next(s.content for s in sections if s.name == ".symtab")
    strings = next(s.content for s in sections if s.name == ".strtab")
    return [_text(strings, struct.unpack_from("<I", table, at)[0]) for at in range(0, len(table), 24)]


def _text(strings: bytes, at: int) -> str:
    return strings[at : strings.index(b"\0", at)].decode()


def _records(info: bytes) -> list[tuple[int, int, int]]:
    """(number, symbol, value) of those that have both."""
    found, at = [], 0
    while at < len(info):
        form, number, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if form != _SIZED:
            continue
        if size == 8:
            found.append((number, *struct.unpack_from("<II", info, at)))
        at += size
    return found
