"""What each kernel's machine code must be: blocks at a time on a multiprocessor, the instructions it is made for, nothing spilled."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from relay.kernels import attention, exact_matmul
from relay.kernels.cuda_compiler import Program
from tests.cubins.cubin import Resources, instructions, resources

# of a multiprocessor, by architecture: bytes of shared memory; of registers and threads all have the same
_SHARED: Final = {80: 164 << 10, 90: 228 << 10, 100: 228 << 10}
_REGISTERS, _WARPS, _BLOCKS, _RESERVED = 65536, 64, 32, 1024

_MMA, _MATRICES, _COPY = r"HMMA\.16816\.F32", r"LDSM\.16\.M88\.4", r"LDGSTS\.E\.BYPASS.*\.128"
_WIDE_LOAD, _STREAM, _WIDE_STORE = r"LDG\.E\..*128", r"LDG\.E\.NA\.128", r"STG\.E\.128"
_ATTENTION: Final = (_MMA, _MATRICES, r"LDSM\.16\.MT88\.4", _COPY, r"MUFU\.EX2")
_PRODUCT: Final = (_MMA, _MATRICES, _COPY)
_PACKED: Final = (_MMA, _STREAM, r"H(FMA|MUL)2")


@dataclass(frozen=True, slots=True)
class Wanted:
    """registers: at most. blocks: at least so many at a time on sm_80, sm_90, sm_100. dynamic: shared memory that the launcher adds."""

    threads: int
    registers: int
    blocks: tuple[int, int, int]
    instructions: tuple[str, ...]
    dynamic: int = 0


def wanted(program: Program, kernel: str) -> Wanted:
    if program.stem in ("paged_decode", "paged_prefill"):
        head_dim = int(dict(program.macros)["HEAD_DIM"])
        if kernel == "paged_decode_fold":
            return Wanted(head_dim, 32, (1536 // head_dim,) * 3, (r"LDG\.E\.CONSTANT",))
        if kernel == "paged_decode":
            blocks = {64: (4, 6, 6), 96: (4, 5, 5), 128: (3, 4, 4), 256: (2, 3, 3)}[head_dim]
            registers = {64: 152, 96: 208, 128: 224, 256: 248}[head_dim]
            return Wanted(32 * -(-head_dim // 128), registers, blocks, _ATTENTION, attention.shared_bytes(head_dim))
        return Wanted(256, {64: 176, 96: 255, 128: 255, 256: 255}[head_dim], (1, 1, 1), _ATTENTION, attention.shared_bytes(head_dim))
    if program.stem == "exact_matmul":
        rows = int(kernel.rsplit("_", 1)[1])
        threads, registers, blocks = {16: (128, 64, (3, 4, 4)), 64: (128, 104, (2, 3, 3)), 128: (256, 128, (1, 2, 2))}[rows]
        return Wanted(threads, registers, blocks, _PRODUCT, exact_matmul.shared_bytes(rows))
    return _OTHERS[kernel]


_OTHERS: Final = {
    "kv_scatter_rope": Wanted(128, 48, (10, 10, 10), (_STREAM, _WIDE_STORE)),
    "kv_transfer": Wanted(256, 80, (3, 3, 3), (_STREAM, _WIDE_STORE)),
    "rms_norm": Wanted(256, 40, (6, 6, 6), (_WIDE_LOAD, _WIDE_STORE)),
    "silu_mul": Wanted(256, 32, (8, 8, 8), (_STREAM, _WIDE_STORE, r"MUFU\.EX2")),
    "sample_tokens": Wanted(1024, 64, (1, 1, 1), (r"ATOMS\.ADD", r"ATOMS\.POPC\.INC")),
    "tally_tokens": Wanted(1024, 24, (2, 2, 2), (r"REDG?\.E\.ADD", r"REDG?\.E\.OR")),
    "quant_matvec_8": Wanted(256, 128, (2, 2, 2), _PACKED),
    "quant_matvec_32": Wanted(256, 240, (1, 1, 1), _PACKED),
}


def blocks_at_a_time(used: Resources, want: Wanted, architecture: int) -> int:
    """On one multiprocessor. Registers are given to warps in units of 256, a block has whole groups of 4 warps where that binds."""
    warps = -(-want.threads // 32)
    by_registers = _REGISTERS // (-(-used.registers * 32 // 256) * 256) // 4 * 4 // warps
    by_shared = _SHARED[architecture] // (used.shared + want.dynamic + _RESERVED)
    return min(by_registers, by_shared, _WARPS // warps, _BLOCKS)


def faults(program: Program, architecture: int, cubin: Path) -> list[str]:
    """What is wrong with the code of a cubin; nothing, it is to be hoped."""
    used, code = resources(cubin.read_bytes(), architecture), instructions(cubin)
    wrong = []
    for kernel in used:
        want, has = wanted(program, kernel), code[kernel]
        where = f"{program.name}:{kernel} on sm_{architecture}"
        local = [opcode for opcode in has if re.match(r"LDL|STL", opcode)]
        if local or used[kernel].stack:
            wrong.append(f"{where} has {used[kernel].stack} bytes of stack and {', '.join(local) or 'no'} accesses of local memory")
        blocks, least = blocks_at_a_time(used[kernel], want, architecture), want.blocks[(80, 90, 100).index(architecture)]
        if blocks < least or used[kernel].registers > want.registers:
            wrong.append(
                f"{where} has {used[kernel].registers} registers and {blocks} blocks at a time; wanted {want.registers} and {least}"
            )
        for pattern in want.instructions:
            if not any(re.match(pattern, opcode) for opcode in has):
                wrong.append(f"{where} has no instruction like {pattern}")
    return wrong
