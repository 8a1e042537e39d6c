"""torch's own attention over paged keys and values, against the definition in float64, and in the place of our kernel."""

import pytest
import torch

from relay.kernels.paged_prefill import reference, torch_prefill
from tests.kernels.paged import paged, relative_error

CHUNKS = [(50, 290), (1, 17), (40, 40)]  # rows, keys: behind a history, a single row, from the start


@pytest.mark.parametrize("window", [0, 1, 33, 280])
@pytest.mark.parametrize(("n_kv_heads", "group"), [(2, 3), (1, 1)])
def test_it_is_what_attention_says(n_kv_heads: int, group: int, window: int) -> None:
    """In a pool of NaN: nothing is read that nobody wrote."""
    kv = paged([n_keys for _, n_keys in CHUNKS], n_kv_heads=n_kv_heads, head_dim=64, dtype=torch.bfloat16)
    rows = [n_rows for n_rows, _ in CHUNKS]
    q = torch.randn(sum(rows), n_kv_heads * group, 64, generator=torch.Generator().manual_seed(7)).to(torch.bfloat16)
    out = torch.full_like(q, float("nan"))
    torch_prefill(q, kv.keys, kv.values, kv.table, CHUNKS, out, scale=0.125, window=window)
    starts = torch.tensor([0, *torch.tensor(rows).cumsum(0).tolist()], dtype=torch.int32)
    want = reference(q, kv.keys, kv.values, kv.table, starts, kv.lengths, scale=0.125, window=window)
    assert relative_error(out, want) < 8e-3
