"""Every program of this room: what can be built before it is needed.

python -m relay.kernels.cuda_programs 90        build all for sm_90 into the cache, several at a time
"""

import os
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from relay.kernels import (
    exact_matmul,
    kv_scatter_rope,
    kv_transfer,
    paged_decode,
    paged_prefill,
    quant_matvec,
    rms_norm,
    sample_tokens,
    silu_mul,
)
from relay.kernels.cuda_compiler import Program, build

PROGRAMS: Final[tuple[Program, ...]] = (
    *exact_matmul.PROGRAMS,
    *kv_scatter_rope.PROGRAMS,
    *kv_transfer.PROGRAMS,
    *paged_decode.PROGRAMS,
    *paged_prefill.PROGRAMS,
    *quant_matvec.PROGRAMS,
    *rms_norm.PROGRAMS,
    *sample_tokens.PROGRAMS,
    *silu_mul.PROGRAMS,
)


def build_all(pairs: Iterable[tuple[Program, int]]) -> list[Path]:
    """Cubins of (program, architecture), in that order. Raises KernelsUnavailable."""
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:  # the compiler works outside of the interpreter's lock
        return list(pool.map(lambda pair: build(*pair), pairs))


if __name__ == "__main__":
    for place in build_all((program, int(sys.argv[1])) for program in PROGRAMS):
        print(place)
