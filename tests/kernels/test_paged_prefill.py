from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from relay.kernels import paged_decode
from relay.kernels.emulator.compiler import Mode
from relay.kernels.emulator.device import EmulatedDevice
from relay.kernels.paged_prefill import PROGRAMS, paged_prefill, reference
from tests.kernels.paged import Paged, paged, relative_error, same_bits

TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 5e-4}
PLAIN = EmulatedDevice(PROGRAMS)
WATCHED = [program for program in PROGRAMS if ("ELEMENT", "bf16") in program.macros]  # the other differs in conversions only


def starts_of(rows: Sequence[int]) -> Tensor:
    return torch.tensor([0, *torch.tensor(rows, dtype=torch.int32).cumsum(0).tolist()], dtype=torch.int32)


def queries(n: int, n_heads: int, head_dim: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(n, n_heads, head_dim, generator=torch.Generator().manual_seed(7)).to(dtype)


def prefill(q: Tensor, kv: Paged, rows: Sequence[int], *, on: EmulatedDevice = PLAIN, **rule: Any) -> Tensor:
    out = torch.full_like(q, float("nan"))
    rule.setdefault("n_most", max(rows, default=0))
    paged_prefill(q, kv.keys, kv.values, kv.table, starts_of(rows), kv.lengths, out, scale=q.shape[2] ** -0.5, on=on, **rule)
    return out


def error(got: Tensor, q: Tensor, kv: Paged, rows: Sequence[int], **rule: Any) -> float:
    want = reference(q, kv.keys, kv.values, kv.table, starts_of(rows), kv.lengths, scale=q.shape[2] ** -0.5, **rule)
    return relative_error(got, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize(
    ("lengths", "rows", "n_kv_heads", "group", "block_tokens"),
    [
        ([1], [1], 1, 1, 16),
        ([40, 9, 33], [40, 0, 5], 2, 3, 16),  # from the start, nothing, after a history
        ([290], [50], 1, 4, 32),
        ([300, 17], [1, 17], 1, 17, 8),
    ],
)
def test_prefill_is_what_attention_says(
    dtype: torch.dtype, head_dim: int, lengths: list[int], rows: list[int], n_kv_heads: int, group: int, block_tokens: int
) -> None:
    kv = paged(lengths, n_kv_heads=n_kv_heads, head_dim=head_dim, dtype=dtype, block_tokens=block_tokens)
    q = queries(sum(rows), n_kv_heads * group, head_dim, dtype)
    assert error(prefill(q, kv, rows), q, kv, rows) < TOLERANCE[dtype]


@pytest.mark.parametrize("key", [3, 256, 275])
def test_a_nan_in_one_key_is_not_hidden(key: int) -> None:
    """From every row that sees it."""
    kv = paged([290], n_kv_heads=1, head_dim=64, dtype=torch.bfloat16)
    kv.keys[kv.table[0, key // 16], 0, key % 16] = float("nan")
    got = prefill(queries(50, 3, 64), kv, [50])
    assert [bool(row.isnan().all()) for row in got] == [position >= key for position in range(240, 290)]


@pytest.mark.parametrize(("cap", "window"), [(5.0, 0), (0.0, 1), (0.0, 33), (2.0, 280)])
def test_soft_cap_and_sliding_window(cap: float, window: int) -> None:
    kv = paged([310], n_kv_heads=1, head_dim=64, dtype=torch.bfloat16)
    q = queries(150, 2, 64) * 3
    assert error(prefill(q, kv, [150], cap=cap, window=window), q, kv, [150], cap=cap, window=window) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize(("head_dim", "group", "window"), [(64, 3, 0), (128, 4, 40), (256, 2, 270)])
def test_a_row_has_the_same_bits_in_any_chunk_and_in_decode(head_dim: int, group: int, window: int) -> None:
    length = 300
    kv = paged([length], n_kv_heads=1, head_dim=head_dim, dtype=torch.bfloat16)
    q = queries(length, group, head_dim)
    whole = prefill(q, kv, [length], window=window)
    for size in (37, 128):
        for begin in range(0, length, size):
            end = min(length, begin + size)
            part = Paged(kv.keys, kv.values, kv.table, torch.tensor([end], dtype=torch.int32))
            assert same_bits(prefill(q[begin:end].clone(), part, [end - begin], window=window), whole[begin:end]), (begin, end)
    positions = [0, 15, 31, 32, 255, 256, 299]
    lengths = torch.tensor(positions, dtype=torch.int32) + 1
    out = torch.empty_like(q[positions])
    work = paged_decode.workspace(len(positions), group, head_dim, length, torch.device("cpu"))
    table = kv.table.expand(len(positions), -1).contiguous()
    device = EmulatedDevice(paged_decode.PROGRAMS)
    paged_decode.paged_decode(q[positions], kv.keys, kv.values, table, lengths, out, work, scale=head_dim**-0.5, window=window, on=device)
    assert same_bits(out, whole[positions])


def test_a_row_does_not_depend_on_the_batch() -> None:
    lengths, rows = [40, 300, 70], [40, 20, 33]
    kv = paged(lengths, n_kv_heads=2, head_dim=64, dtype=torch.bfloat16)
    q = queries(sum(rows), 6, 64)
    together = prefill(q, kv, rows)
    begin = starts_of(rows).tolist()
    for i in range(3):
        alone = prefill(q[begin[i] : begin[i + 1]].clone(), kv.only(i), [rows[i]], n_most=64)
        assert same_bits(alone, together[begin[i] : begin[i + 1]]), i


@pytest.mark.parametrize("seed", [1, 2])
def test_the_order_of_threads_and_blocks_changes_nothing(seed: int) -> None:
    kv = paged([290, 30], n_kv_heads=2, head_dim=96, dtype=torch.float16)
    q = queries(50, 6, 96, torch.float16)
    assert same_bits(prefill(q, kv, [20, 30], on=EmulatedDevice(PROGRAMS, seed=seed)), prefill(q, kv, [20, 30]))


@pytest.mark.parametrize(
    ("mode", "head_dim"), [("address", 64), ("address", 96), ("address", 128), ("address", 256), ("thread", 64), ("thread", 256)]
)
def test_sanitizers_find_nothing(mode: Mode, head_dim: int) -> None:
    kv = paged([17, 290], n_kv_heads=1, head_dim=head_dim, dtype=torch.bfloat16)
    q = queries(22, 6, head_dim)
    assert same_bits(prefill(q, kv, [17, 5], on=EmulatedDevice(WATCHED, mode), window=280), prefill(q, kv, [17, 5], window=280))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"starts": torch.zeros(2, dtype=torch.int32)}, r"starts has shape \[2\]; expected \[3\]"),
        ({"out": torch.zeros(4, 4, 64)}, "out is torch.float32"),
        ({"values": torch.zeros(1, 2, 16, 64, dtype=torch.bfloat16)}, "values has shape"),
        ({"cap": -1.0}, "cap -1"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, object], message: str) -> None:
    kv = paged([5, 6], n_kv_heads=2, head_dim=64, dtype=torch.bfloat16)
    q = queries(4, 4, 64)
    given: dict[str, Any] = {"q": q, "keys": kv.keys, "values": kv.values, "table": kv.table, "starts": starts_of([2, 2])}
    given |= {"lengths": kv.lengths, "out": torch.zeros_like(q), "n_most": 2, "scale": 0.125, "on": PLAIN}
    with pytest.raises(ValueError, match=message):
        paged_prefill(**(given | change))
