"""The table of kernels, from their cubins: python -m tests.cubins.table > scripts/measured/kernels.md"""

from collections.abc import Iterator

from relay.kernels.cuda_compiler import ARCHITECTURES, Program, build, build_all
from relay.kernels.cuda_programs import PROGRAMS
from tests.cubins.cubin import resources
from tests.cubins.wanted import blocks_at_a_time, wanted
from tests.cubins.workloads import BYTES_A_SECOND, OPERATIONS_A_SECOND, WORKLOADS

_HEAD = """# The CUDA kernels

Written by `scripts/kernels`: from the machine code that NVRTC makes, and from arithmetic. Nothing here was measured on a GPU. Every
variant spills nothing. Occupancy is blocks at a time on one multiprocessor of an H200, and the share of its 64 warps.

| program | kernel | threads | registers sm_80 / 90 / 100 | shared memory, bytes | blocks (warps) |
|---|---|---|---|---|---|
"""
_FLOORS = f"""
## The floor of each kernel's time

At {BYTES_A_SECOND / 1e12:.1f} TB/s and {OPERATIONS_A_SECOND / 1e12:.0f} TFLOP/s, the larger of the two, in the shape of Llama 3 8B (bf16,
one layer; Q4_K for `quant_matvec`). What bytes and operations count: `tests/cubins/workloads.py`. A launch itself takes a few microseconds
more, so times below that say only that the kernel isn't what counts.

| kernel | shape | bytes | operations | bound by | predicted, us |
|---|---|---|---|---|---|
"""


def rows() -> Iterator[str]:
    for program in PROGRAMS:
        used = {a: resources(build(program, a).read_bytes(), a) for a in ARCHITECTURES}
        for kernel, on_90 in sorted(used[90].items()):
            want = wanted(program, kernel)
            registers = " / ".join(str(used[a][kernel].registers) for a in ARCHITECTURES)
            blocks = blocks_at_a_time(on_90, want, 90)
            share = blocks * -(-want.threads // 32) / 64
            cells = (_variant(program), kernel, want.threads, registers, on_90.shared + want.dynamic, f"{blocks} ({share:.0%})")
            yield f"| {' | '.join(map(str, cells))} |"


def _variant(program: Program) -> str:
    return " ".join((program.stem, *(value for name, value in program.macros if name != "STAGES")))


def table() -> str:
    floors = (
        f"| {kernel} | {w.shape} | {_short(w.bytes)} | {_short(w.operations)} | {w.bound} | {w.seconds * 1e6:.1f} |"
        for kernel, w in WORKLOADS.items()
    )
    return _HEAD + "\n".join(rows()) + "\n" + _FLOORS + "\n".join(floors) + "\n"


def _short(n: float) -> str:
    for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if n >= unit:
            return f"{n / unit:.3g} {name}"
    return f"{n:.0f}" if n else "-"


if __name__ == "__main__":
    build_all((program, architecture) for program in PROGRAMS for architecture in ARCHITECTURES)
    print(table(), end="")
