"""Every program of this room: what can be built before it is needed.

python -m relay.kernels.cuda_programs 90        build all for sm_90 into the cache, several at a time
"""

import sys
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
from relay.kernels.cuda_compiler import Program, build_all

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


if __name__ == "__main__":
    for place in build_all((program, int(sys.argv[1])) for program in PROGRAMS):
        print(place)
