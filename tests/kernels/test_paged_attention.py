"""Attention against a plain softmax in float64, for every type, grouping, width and window, in pools of NaN."""

import numpy as np
import pytest
from numpy.typing import NDArray

from relay.kernels.paged_attention import KV_TYPES, PAGE_TOKENS, SPLIT, TILE_QUERIES, PagedAttention, head_bytes, reference

TOLERANCE = {"bfloat16": 2e-2, "float16": 3e-3, "int8": 8e-2, "float32": 5e-6}
N_TOKENS = 2 * SPLIT + 40


class Filled:
    """A pool with one sequence in scattered blocks of its second layer, and what was written there in float64."""

    def __init__(self, kv_type: str, head_dim: int, n_kv_heads: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        n_blocks = -(-N_TOKENS // PAGE_TOKENS)
        self.kernel = PagedAttention(kv_type, n_layers=2, n_blocks=n_blocks + 3, n_kv_heads=n_kv_heads, head_dim=head_dim)
        self.blocks = rng.permutation(n_blocks + 3)[:n_blocks].astype(np.int32)
        self.k, self.v = (rng.standard_normal((N_TOKENS, n_kv_heads, head_dim)).astype(np.float32) for _ in range(2))
        self.head_dim = head_dim
        self.rng = rng
        for side, values in enumerate((self.k, self.v)):
            for token, heads in enumerate(values):
                for head, vector in enumerate(heads):
                    self.kernel.write(1, side, int(self.blocks[token // PAGE_TOKENS]), token % PAGE_TOKENS, head, vector)

    def queries(self, n_rows: int, group: int) -> NDArray[np.float32]:
        return np.asarray(self.rng.standard_normal((n_rows, group, self.head_dim)) / self.head_dim**0.5 * 2, np.float32)

    def expected(self, q: NDArray[np.float32], head: int, position: int, window: int) -> NDArray[np.float64]:
        k, v = (values[:, head : head + 1].astype(np.float64) for values in (self.k, self.v))
        return reference(q.astype(np.float64), k, v, np.arange(position, position + len(q), dtype=np.int32), window)


ROWS = 15
POSITIONS = (0, 1, 14, 15, 16, 31, 100, SPLIT - 1, SPLIT, SPLIT + 1, 2 * SPLIT, N_TOKENS - ROWS)


@pytest.mark.parametrize("kv_type", KV_TYPES)
@pytest.mark.parametrize(
    ("head_dim", "group", "n_kv_heads"), [(64, 3, 3), (32, 1, 2), (80, 2, 1), (96, 4, 1), (128, 7, 2), (16, 24, 1), (272, 2, 1)]
)
def test_rows_and_tiles_mix_what_they_see(kv_type: str, head_dim: int, group: int, n_kv_heads: int) -> None:
    filled = Filled(kv_type, head_dim, n_kv_heads)
    for window in (0, 1, 13, 16, 200, 300):
        for position in POSITIONS:
            q, head = filled.queries(min(ROWS, TILE_QUERIES // group), group), position % n_kv_heads
            tile = filled.kernel.attend(q, filled.blocks, layer=1, kv_head=head, position=position, window=window)
            assert np.abs(tile - filled.expected(q, head, position, window)).max() < TOLERANCE[kv_type]
            for row in (0, len(q) - 1):
                alone = filled.kernel.attend(q[row : row + 1], filled.blocks, layer=1, kv_head=head, position=position + row, window=window)
                assert np.array_equal(alone[0].view(np.uint32), tile[row].view(np.uint32)), (window, position, row)


@pytest.mark.parametrize("token", [0, 20, SPLIT + 3])
def test_a_nan_in_one_key_is_not_hidden(token: int) -> None:
    """From no row that sees it."""
    filled = Filled("bfloat16", 64, 1)
    block = int(filled.blocks[token // PAGE_TOKENS])
    filled.kernel.write(1, 0, block, token % PAGE_TOKENS, 0, np.full(64, np.nan, np.float32))
    q = filled.queries(8, 3)
    for position in (token + 1, 2 * SPLIT):
        assert np.isnan(filled.kernel.attend(q, filled.blocks, layer=1, kv_head=0, position=position)).all()
        assert np.isnan(filled.kernel.attend(q[:1], filled.blocks, layer=1, kv_head=0, position=position)).all()


def test_large_scores_do_not_overflow() -> None:
    filled = Filled("float32", 32, 1)
    q = filled.queries(2, 2) * np.float32(500)
    found = filled.kernel.attend(q, filled.blocks, layer=1, kv_head=0, position=400)
    assert np.abs(found - filled.expected(q, 0, 400, 0)).max() < 1e-3


def test_what_is_written_is_read_back_rounded_to_its_type() -> None:
    """One key is one weight: attention at position 0 returns its value."""
    vector = np.array([1.0, -2.5, 1 / 3, 1e-3, 65000.0, 0.0, -1e-30, 7.0] * 4, np.float32)
    bits = vector.view(np.uint32)
    rounded = {
        "bfloat16": ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32),
        "float16": vector.astype(np.float16).astype(np.float32),
        "float32": vector,
        "int8": (np.rint(vector / (vector.max() / np.float32(127))) * (vector.max() / np.float32(127))).astype(np.float32),
    }
    for kv_type, expected in rounded.items():
        kernel = PagedAttention(kv_type, n_layers=1, n_blocks=1, n_kv_heads=1, head_dim=32)
        for side in (0, 1):
            kernel.write(0, side, 0, 0, 0, vector)
        found = kernel.attend(np.zeros((1, 1, 32), np.float32), np.zeros(1, np.int32), layer=0, kv_head=0, position=0)
        assert found[0, 0] == pytest.approx(expected, rel=1e-6)


def test_a_write_touches_its_slot_alone() -> None:
    for kv_type in KV_TYPES:
        kernel = PagedAttention(kv_type, n_layers=2, n_blocks=3, n_kv_heads=2, head_dim=32)
        before = kernel.pages.copy()
        kernel.write(1, 1, 2, 5, 1, np.zeros(32, np.float32))
        changed = kernel.pages != before
        assert changed[1, 1, 2, 1].sum() == head_bytes(kv_type, 32) // PAGE_TOKENS
        assert changed.sum() == changed[1, 1, 2, 1].sum()


def test_what_leads_outside_is_refused() -> None:
    kernel = PagedAttention("float32", n_layers=1, n_blocks=2, n_kv_heads=1, head_dim=32)
    vector, q = np.zeros(32, np.float32), np.zeros((1, 1, 32), np.float32)
    for wrong in ((1, 0, 0, 0, 0), (0, 2, 0, 0, 0), (0, 0, 2, 0, 0), (0, 0, 0, 16, 0), (0, 0, 0, 0, 1), (0, 0, -1, 0, 0)):
        with pytest.raises(IndexError):
            kernel.write(*wrong, vector)
    with pytest.raises(ValueError, match="contiguous"):
        kernel.write(0, 0, 0, 0, 0, vector[::2])
    for blocks, position in (([0], 16), ([2], 0), ([-1], 0), ([0], -1)):
        with pytest.raises(IndexError):
            kernel.attend(q, np.array(blocks, np.int32), layer=0, kv_head=0, position=position)
    with pytest.raises(ValueError, match="queries"):
        kernel.attend(np.zeros((7, 7, 32), np.float32), np.zeros(1, np.int32), layer=0, kv_head=0, position=0)
    with pytest.raises(ValueError, match="multiple of 16"):
        PagedAttention("float32", n_layers=1, n_blocks=2, n_kv_heads=1, head_dim=40)
