"""What each kernel moves and computes on one shape of a real model's step: the floor of its time on a GPU that nobody has asked yet.

The shape is Llama 3 8B's (32 heads on 8 of width 128, hidden 4096, ffn 14336, vocabulary 128256) in bf16. bytes: what must cross the
memory bus, each once, were caches no help and no hindrance; operations: two for a product and its sum, as the mma tiles issue them (a tile
of 16 rows costs the same with fewer), but scores past the causal edge are left out.
"""

from dataclasses import dataclass
from typing import Final

BYTES_A_SECOND: Final = 4.3e12  # an H200's, copying
OPERATIONS_A_SECOND: Final = 790e12  # its bf16 mma

_HEADS, _KV_HEADS, _DIM, _HIDDEN, _FFN, _VOCABULARY = 32, 8, 128, 4096, 14336, 128256
_KV_ROW: Final = 2 * _KV_HEADS * _DIM * 2  # bytes of K and V of a token in a layer
_SPLIT, _ROWS = 256, 16


@dataclass(frozen=True, slots=True)
class Workload:
    shape: str
    bytes: float
    operations: float

    @property
    def seconds(self) -> float:
        return max(self.bytes / BYTES_A_SECOND, self.operations / OPERATIONS_A_SECOND)

    @property
    def bound(self) -> str:
        return "memory" if self.bytes / BYTES_A_SECOND >= self.operations / OPERATIONS_A_SECOND else "mma"


def _decode(sequences: int, context: int) -> Workload:
    parts = sequences * _HEADS * context / _SPLIT * (_DIM + 2) * 4
    operations = 4.0 * sequences * _KV_HEADS * _ROWS * context * _DIM
    return Workload(f"{sequences} sequences x {context} keys", sequences * context * _KV_ROW + parts, operations)


def _fold(sequences: int, context: int) -> Workload:
    parts = sequences * _HEADS * context / _SPLIT * (_DIM + 2) * 4
    return Workload(f"{sequences} sequences x {context // _SPLIT} splits", parts + sequences * _HEADS * _DIM * 2, 0)


def _prefill(rows: int) -> Workload:
    rows_bytes = 2 * rows * _HEADS * _DIM * 2 + rows * _KV_ROW
    return Workload(f"{rows} rows, causal", rows_bytes, 4.0 * _HEADS * _DIM * rows * rows / 2)


def _product(rows: int, tile: int, n_out: int, n_in: int, bits: float = 16) -> Workload:
    moved = n_out * n_in * bits / 8 + rows * (n_in + n_out) * 2
    return Workload(f"{rows} rows x {n_out} x {n_in}", moved, 2.0 * -(-rows // tile) * tile * n_out * n_in)


WORKLOADS: Final = {
    "paged_decode": _decode(64, 4096),
    "paged_decode_fold": _fold(64, 4096),
    "paged_prefill": _prefill(8192),
    # q read and written, K and V read and written, cosines and sines read
    "kv_scatter_rope": Workload("4096 rows", 4096 * (2 * (_HEADS + 2 * _KV_HEADS) * _DIM * 2 + _DIM * 4), 0),
    # both ways: a peer's memory is as far as our own here
    "kv_transfer": Workload("4096 tokens x 32 layers", 2.0 * 4096 * 32 * _KV_ROW, 0),
    "rms_norm": Workload(f"64 rows x {_HIDDEN}, residual", 64 * _HIDDEN * 2 * 4 + _HIDDEN * 2, 0),
    "silu_mul": Workload(f"64 rows x {_FFN}", 64 * _FFN * 2 * 3, 0),
    # top-k and top-p: 2 passes over the logits; over `work` one written, 3 + 3 for the cuts, 1 sum, 1 to draw: each of 4 bytes
    "sample_tokens": Workload(f"64 rows x {_VOCABULARY}, top-k and top-p", 64.0 * _VOCABULARY * 4 * (2 + 1 + 3 + 3 + 1 + 1), 0),
    "tally_tokens": Workload(f"64 sequences x {_VOCABULARY}", 64.0 * _VOCABULARY * 4, 0),
    "quant_matvec_8": _product(1, 8, _FFN, _HIDDEN, 4.625),
    "quant_matvec_32": _product(32, 32, _FFN, _HIDDEN, 4.625),
    "exact_matmul_16": _product(16, 16, _FFN, _HIDDEN),
    "exact_matmul_64": _product(64, 64, _FFN, _HIDDEN),
    "exact_matmul_128": _product(8192, 128, _FFN, _HIDDEN),
}
