"""Bugs to plant in the CUDA kernels, each a text that occurs once in its file and what stands there instead.

`equivalent` says why no test can find it: the kernel computes the same, at most at another speed.
"""

from dataclasses import dataclass
from typing import Final

import pytest

PLANTED: Final = pytest.StashKey[bool]()  # set while tests run on planted bugs


@dataclass(frozen=True, slots=True)
class Mutant:
    file: str
    old: str
    new: str
    equivalent: str = ""


def _of(file: str, *pairs: tuple[str, str] | tuple[str, str, str]) -> tuple[Mutant, ...]:
    return tuple(Mutant(file, *pair) for pair in pairs)


_ATTENTION: Final = _of(
    "attention.cuh",
    ("l[r] *= fade[r];", ""),
    ("fade[r] = exp2_fast(m[r] - most[r]);", "fade[r] = exp2_fast(most[r] - m[r]);"),
    ("m[r] = most[r];\n", "\n"),
    ("key <= at && key", "key < at && key"),
    ("key >= first_key(at, rule.window)", "key > first_key(at, rule.window)"),
    ("position - window + 1 > 0 ? position - window + 1 : 0", "position - window > 0 ? position - window : 0"),
    ("o[j][i] *= fade[i >> 1];", "o[j][i] *= fade[i & 1];"),
    ("p[j / 2][(j % 2) * 2 + r] = pair;", "p[j / 2][(j % 2) + 2 * r] = pair;"),
    ("l[r] += __shfl_xor_sync(ALL_LANES, l[r], 2);", ""),
    ("fade[0] != 1.f || fade[1] != 1.f", "fade[0] != 1.f && fade[1] != 1.f"),
    ("__any_sync(ALL_LANES", "__all_sync(ALL_LANES"),
    ("((lane % 8) + (lane / 16) * 8) * STRIDE + ((lane / 8) % 2) * 8", "((lane % 8) + (lane / 8) % 2 * 8) * STRIDE + (lane / 16) * 8"),
    ("load_matrices_transposed(b, at", "load_matrices(b, at"),
    ("l = fmaf(part_l, y, l * x);", "l = fmaf(part_l, x, l * y);"),
    ("const bool there = key < end;", "const bool there = key <= end;"),
    ("block * n_kv_heads + head", "block * n_kv_heads"),
    ("copy16_async(dst + TILE * STRIDE, values + from, there);", "copy16_async(dst + TILE * STRIDE, keys + from, there);"),
    ("cap * (1.f - __fdiv_rn", "cap * (1.f + __fdiv_rn"),
    ("most[r] = fmaxf(most[r], __shfl_xor_sync(ALL_LANES, most[r], 1));", ""),
    (
        "if (part_m == LEAST && part_l == 0.f) return false;",
        "",
        "a part that saw nothing has l = 0 and o = 0, so it adds 0 either way; the sign of a zero is mended in `folded`",
    ),
)
_DECODE: Final = _of(
    "paged_decode.cu",
    ("first_key(last, window) / TILE * TILE", "first_key(last, window)"),
    ("min(length, (split + 1) * SPLIT)", "length"),
    (
        "from >= to || length > n_splits * SPLIT",
        "from >= to",
        "the fold writes NaN whatever the parts say; nothing is written outside them",
    ),
    ("copy_wait<STAGES - 2>();", "copy_wait<STAGES - 1>();"),
    ("    __syncthreads();\n", ""),
    ("const T* stage = stages + (i % STAGES) * STAGE;", "const T* stage = stages + ((i + 1) % STAGES) * STAGE;"),
    ("row[r] < group ? last : -1;", "last;", "a row past the group has no queries, and nothing of it is written"),
    ("lane % 4 == 0 && first_column == 0", "lane % 4 == 0"),
    ("(group + ROWS - 1) / ROWS", "group / ROWS + 1"),
    ("s < end; s++", "s + 1 < end; s++"),
    ("int s = first_key(length - 1, window) / SPLIT;", "int s = 0;"),
    ("end <= n_splits ? folded(o, l) : not_a_number()", "folded(o, l)"),
    ("table += (i64)sequence * max_blocks;", ""),
    ("first_column = threadIdx.x / 32 * COLUMNS;", "first_column = 0;"),
)
_PREFILL: Final = _of(
    "paged_prefill.cu",
    ("if (i == 0 || first % SPLIT == 0) tile.begin_split();", "if (i == 0) tile.begin_split();"),
    ("(first + TILE) % SPLIT) continue;", "first % SPLIT) continue;"),
    ("first < warp_to &&", "first + TILE < warp_to &&"),
    ("first + TILE > warp_from", "first > warp_from"),
    ("first < warp_to &&", "", "a tile of which no row sees a key leaves m, l and o as they are"),
    ("position[r] = row < n_rows ? history + row / group : -1;", "position[r] = row < n_rows ? history + row : -1;"),
    ("(gridDim.x - 1 - blockIdx.x) * ROW_TILE", "blockIdx.x * ROW_TILE", "the same tiles in another order"),
    ("if (row >= n_rows) continue;", ""),
    ("    __syncthreads();\n", ""),
    ("copy_wait<STAGES - 2>();", "copy_wait<STAGES - 1>();"),
    ("tile.m[r], tile.l[r], x, y)) continue;", "tile.m[r], tile.l[r], x, y)) break;"),
    ("history = lengths[sequence] - n_tokens", "history = lengths[sequence] - n_tokens - 1"),
)
_SCATTER: Final = _of(
    "kv_scatter_rope.cu",
    ("x.x * c.x - y.x * s.x", "x.x * c.x + y.x * s.x"),
    ("y.y * c.y + x.y * s.y", "y.y * c.y + x.x * s.y"),
    ("(position >> page_shift)];", "((position + 1) >> page_shift)];"),
    ("(position & ((1 << page_shift) - 1))", "(position & ((1 << page_shift) - 2))"),
    ("if (head < n_heads + n_kv_heads) turn", "if (head <= n_heads + n_kv_heads) turn"),
    ("(head - n_heads) % n_kv_heads", "head % n_kv_heads"),
    ("if (which < 0) continue;", ""),
    ("if (which >= 0) {", "if (which > 0) {"),
    ("item < n_items; item += 128", "item < min(n_items, 128); item += 128"),
    ("sin + (i64)position * half + column);", "sin + (i64)row * half + column);"),
    ("kv_head << page_shift", "kv_head << (page_shift + 1)"),
)
_TRANSFER: Final = _of(
    "kv_transfer.cu",
    ("return (z ^ (z >> 31)) | 1;", "return z ^ (z >> 31);"),
    ("side * 2 * chunks);", "0);"),
    ("from >= 0 && side < 2", "from > 0 && side < 2"),
    ("      checksums[item] = total;\n    }\n    __syncthreads();\n", "      checksums[item] = total;\n    }\n"),
)
_SAMPLING: Final = _of(
    "sample_tokens.cu",
    ("(u32)(m >> 32) + (before + low < before)", "(u32)(m >> 32)"),
    ("goal > before && goal <= before + first,", "goal > before && goal < before + first,"),
    ("before + through > goal", "before + through >= goal"),
    ("s.sums[w] <= goal", "s.sums[w] < goal"),
    ("block_sum(s, total) + n_equal * weight(cut.key)", "block_sum(s, total)"),
    ("(double)total), (u64)1)", "(double)total), (u64)0)"),
    ("of_mass.above + each - 1) / each", "of_mass.above) / each"),
    ("return n_equal - 1; }", "return n_equal; }"),
    ("k >= least &&", "k > least &&"),
    ("k == cut.key && i <= cut.last_id)) ? weight", "k == cut.key && i < cut.last_id)) ? weight"),
    ("^ row.position) >> 11;", "^ row.position) >> 12;"),
    ("mixed(row.seed) ^ row.choice", "mixed(row.seed)"),
    ("generated = seen >> 1;", "generated = seen;"),
    ("logit > 0.f ? __fdiv_rn", "logit < 0.f ? __fdiv_rn"),
    ("mask[i / 32] >> (i % 32)", "mask[i / 32] >> (i % 31)"),
    ("a.value == b.value && a.id < b.id", "a.value == b.value && a.id > b.id"),
    ("  for (int w = 0; w < WARPS; w++)\n    if (better", "  for (int w = 0; w < WARPS - 1; w++)\n    if (better"),
    ("w < threadIdx.x / 32; w++", "w <= threadIdx.x / 32; w++"),
    ("s.top_ids[j] < i);", "s.top_ids[j] > i);"),
    ("n_top - cut.above - 1; }", "n_top - cut.above; }"),
    ("tally[id] += 2;", "tally[id] += 1;"),
    ("id >= 0 && row.target < 0)", "id >= 0)"),
    ("if (i < generated)", "if (i <= generated)"),
    ("atomicOr(&tally[tokens[i]], 1u);", "atomicAdd(&tally[tokens[i]], 1u);"),
    ("s.low[b] = s.high[b] = 0;\n    __syncthreads();", "s.low[b] = s.high[b] = 0;"),
    ("work[bias_ids[i]] += biases[i];", "work[bias_ids[i]] = biases[i];"),
    ("generated * row.frequency_penalty + row.presence_penalty", "generated * row.frequency_penalty - row.presence_penalty"),
    ("min(row.n_top, n)", "row.n_top"),
    ("(k >> (shift + 11)) != prefix", "(k >> (shift + 10)) != prefix"),
    (
        "row.top_k > 0 && row.top_k < n",
        "row.top_k > 0 && row.top_k <= n",
        "a cut of all n ends at the least weight and keeps all that equal it",
    ),
    ("if (lane >= o) through += before;", "if (lane > o) through += before;"),
)

TESTS: Final = {
    "attention.cuh": ("test_paged_decode.py", "test_paged_prefill.py"),
    "paged_decode.cu": ("test_paged_decode.py", "test_paged_prefill.py"),
    "paged_prefill.cu": ("test_paged_prefill.py",),
    "kv_scatter_rope.cu": ("test_kv_scatter_rope.py",),
    "kv_transfer.cu": ("test_kv_transfer.py",),
    "sample_tokens.cu": ("test_sample_tokens.py",),
}
MUTANTS: Final = _ATTENTION + _DECODE + _PREFILL + _SCATTER + _TRANSFER + _SAMPLING
