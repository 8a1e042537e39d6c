"""The kernels that a model's steps launch, of all that there are: what a device is asked to load, and the emulator to compile."""

from typing import Final

from relay.kernels.cuda_compiler import Program
from relay.kernels.cuda_programs import PROGRAMS
from relay.model.spec import ModelSpec

_ELEMENTS: Final = {"bfloat16": "bf16", "float16": "fp16"}


def programs_for(spec: ModelSpec, dtype: str, matrix_types: frozenset[str]) -> tuple[Program, ...]:
    """dtype: of the KV pool and the step. matrix_types: of the file's matrices."""
    wanted: dict[str, frozenset[str]] = {
        "ELEMENT": frozenset((_ELEMENTS[dtype],)),
        "HEAD_DIM": frozenset((str(spec.head_dim),)),
        "ACTIVATION": frozenset((spec.traits.activation,)),
        "FORMAT": matrix_types,
    }
    return tuple(program for program in PROGRAMS if all(name not in wanted or value in wanted[name] for name, value in program.macros))
