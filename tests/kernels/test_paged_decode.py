import pytest
import torch
from torch import Tensor

from relay.kernels.cuda_library import CUDA
from relay.kernels.emulator.compiler import Mode
from relay.kernels.emulator.device import EmulatedDevice
from relay.kernels.paged_decode import PROGRAMS, paged_decode, reference, workspace
from tests.kernels.paged import Paged, paged, relative_error, same_bits

TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 5e-4}
PLAIN = EmulatedDevice(PROGRAMS)
WATCHED = [program for program in PROGRAMS if ("ELEMENT", "bf16") in program.macros]  # the other differs in conversions only


def queries(n: int, n_heads: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(n, n_heads, head_dim, generator=torch.Generator().manual_seed(7)).to(dtype)


def decode(q: Tensor, kv: Paged, *, on: EmulatedDevice = PLAIN, context: int = 0, cap: float = 0.0, window: int = 0) -> Tensor:
    out = torch.full_like(q, float("nan"))
    work = workspace(len(q), q.shape[1], q.shape[2], context or int(kv.lengths.max()), torch.device("cpu"))
    work.part_o.fill_(float("nan"))
    work.part_ml.fill_(float("nan"))
    paged_decode(q, kv.keys, kv.values, kv.table, kv.lengths, out, work, scale=q.shape[2] ** -0.5, cap=cap, window=window, on=on)
    return out


def error(got: Tensor, q: Tensor, kv: Paged, *, cap: float = 0.0, window: int = 0) -> float:
    want = reference(q, kv.keys, kv.values, kv.table, kv.lengths, scale=q.shape[2] ** -0.5, cap=cap, window=window)
    return relative_error(got, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize(
    ("lengths", "n_kv_heads", "group", "block_tokens"),
    [
        ([1], 1, 1, 16),
        ([0, 1, 15, 16, 17, 31, 32, 33], 1, 3, 16),
        ([255, 256, 257, 0, 300], 2, 4, 16),
        ([90, 5], 1, 17, 32),  # more heads than a tile has rows
        ([40], 2, 16, 16),  # as many heads as a tile has rows
        ([700, 40], 1, 7, 8),
        ([1100], 1, 8, 64),
    ],
)
def test_decode_is_what_attention_says(
    dtype: torch.dtype, head_dim: int, lengths: list[int], n_kv_heads: int, group: int, block_tokens: int
) -> None:
    kv = paged(lengths, n_kv_heads=n_kv_heads, head_dim=head_dim, dtype=dtype, block_tokens=block_tokens)
    q = queries(len(lengths), n_kv_heads * group, head_dim, dtype)
    got = decode(q, kv)
    assert error(got, q, kv) < TOLERANCE[dtype]
    assert not got[kv.lengths == 0].any()


@pytest.mark.parametrize(("cap", "window"), [(5.0, 0), (0.0, 1), (0.0, 40), (0.0, 256), (2.0, 300), (0.0, 5000)])
def test_soft_cap_and_sliding_window(cap: float, window: int) -> None:
    kv = paged([3, 290, 600], n_kv_heads=2, head_dim=64, dtype=torch.bfloat16)
    q = queries(3, 8, 64, torch.bfloat16) * 3
    assert error(decode(q, kv, cap=cap, window=window), q, kv, cap=cap, window=window) < TOLERANCE[torch.bfloat16]


def test_a_long_context() -> None:
    kv = paged([5000], n_kv_heads=1, head_dim=128, dtype=torch.bfloat16)
    q = queries(1, 4, 128, torch.bfloat16)
    assert error(decode(q, kv), q, kv) < TOLERANCE[torch.bfloat16]


def test_large_scores_do_not_overflow() -> None:
    kv = paged([70], n_kv_heads=1, head_dim=64, dtype=torch.float16)
    q = queries(1, 2, 64, torch.float16) * 1000
    assert error(decode(q, kv), q, kv) < 1e-3


@pytest.mark.parametrize("head_dim", [64, 256])
def test_a_row_does_not_depend_on_the_batch(head_dim: int) -> None:
    lengths = [1, 300, 64, 513, 0, 257]
    kv = paged(lengths, n_kv_heads=2, head_dim=head_dim, dtype=torch.bfloat16)
    q = queries(len(lengths), 6, head_dim, torch.bfloat16)
    together = decode(q, kv)
    for rows in ([0], [1], [2], [3], [5], [3, 1], [5, 4, 3, 2, 1, 0], [0, 2]):
        alone = decode(q[rows], kv.only(*rows), context=640)
        assert same_bits(alone, together[rows]), rows


def test_a_row_does_not_depend_on_where_its_blocks_lie_nor_on_their_size_nor_on_the_grid() -> None:
    q = queries(2, 4, 128, torch.bfloat16)

    def result(**options: int) -> Tensor:
        context = options.pop("context", 700)
        return decode(q, paged([290, 611], n_kv_heads=1, head_dim=128, dtype=torch.bfloat16, **options), context=context)

    first = result()
    assert same_bits(result(order_seed=1), first)
    assert same_bits(result(block_tokens=64), first)
    assert same_bits(result(context=4096), first)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_order_of_threads_and_blocks_changes_nothing(seed: int) -> None:
    kv = paged([70, 290], n_kv_heads=1, head_dim=96, dtype=torch.float16)
    q = queries(2, 3, 96, torch.float16)
    assert same_bits(decode(q, kv, on=EmulatedDevice(PROGRAMS, seed=seed)), decode(q, kv))


@pytest.mark.parametrize(
    ("mode", "head_dim"), [("address", 64), ("address", 96), ("address", 128), ("address", 256), ("thread", 64), ("thread", 256)]
)
def test_sanitizers_find_nothing(mode: Mode, head_dim: int) -> None:
    kv = paged([1, 17, 290, 0], n_kv_heads=2, head_dim=head_dim, dtype=torch.bfloat16)
    q = queries(4, 6, head_dim, torch.bfloat16)
    assert same_bits(decode(q, kv, on=EmulatedDevice(WATCHED, mode), window=280), decode(q, kv, window=280))


def test_a_sequence_longer_than_the_workspace_becomes_nan() -> None:
    kv = paged([257, 20], n_kv_heads=1, head_dim=64, dtype=torch.bfloat16)
    got = decode(queries(2, 1, 64, torch.bfloat16), kv, context=256)
    assert got[0].isnan().all()
    assert not got[1].isnan().any()


@pytest.mark.parametrize("key", [3, 40, 256, 270])
def test_a_nan_in_one_key_is_not_hidden(key: int) -> None:
    """In the first or last tile of a split, in the first or second split; and where nothing else is seen."""
    kv = paged([290, 290], n_kv_heads=1, head_dim=64, dtype=torch.bfloat16)
    kv.keys[kv.table[0, key // 16], 0, key % 16] = float("nan")
    q = queries(2, 3, 64, torch.bfloat16)
    got = decode(q, kv)
    assert got[0].isnan().all()
    assert not got[1].isnan().any()
    kv.keys[kv.table[0, :19]] = float("nan")
    assert decode(q, kv)[0].isnan().all()


def test_an_empty_batch_launches_nothing() -> None:
    kv = paged([5], n_kv_heads=1, head_dim=64, dtype=torch.bfloat16)
    assert decode(queries(1, 1, 64, torch.bfloat16)[:0], kv.only(), context=16).shape == (0, 1, 64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 4, 64)}, "q is torch.float32; expected torch.bfloat16 or torch.float16"),
        ({"q": torch.zeros(2, 4, 80, dtype=torch.bfloat16)}, r"keys has shape .*; expected \[any, any, any, 80\]"),
        ({"q": torch.zeros(2, 3, 64, dtype=torch.bfloat16)}, "3 heads on 2 K/V heads"),
        ({"work": workspace(2, 6, 64, 16, torch.device("cpu"))}, "work.part_o has shape"),
        ({"out": torch.zeros(2, 64, 4, dtype=torch.bfloat16).transpose(1, 2)}, "out has strides"),
        ({"q": torch.zeros(513, dtype=torch.bfloat16)[1:].view(2, 4, 64)}, "q lies at an address that is no multiple of 16"),
        ({"lengths": torch.zeros(2)}, "lengths is torch.float32; expected torch.int32"),
        ({"table": torch.zeros(3, 2, dtype=torch.int32)}, r"table has shape \[3, 2\]; expected \[2, any\]"),
        (
            {"keys": torch.zeros(4, 2, 12, 64, dtype=torch.bfloat16), "values": torch.zeros(4, 2, 12, 64, dtype=torch.bfloat16)},
            "block_tokens is 12",
        ),
        (
            {"keys": torch.zeros(4, 3, 16, 64, dtype=torch.bfloat16), "values": torch.zeros(4, 3, 16, 64, dtype=torch.bfloat16)},
            "4 heads on 3 K/V",
        ),
        ({"window": -1}, "window -1"),
        ({"scale": float("nan")}, "scale nan"),
        ({"on": CUDA}, "q is on cpu; expected it on cuda"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, object], message: str) -> None:
    kv = paged([5, 6], n_kv_heads=2, head_dim=64, dtype=torch.bfloat16)
    given: dict[str, object] = {
        "q": torch.zeros(2, 4, 64, dtype=torch.bfloat16),
        "keys": kv.keys,
        "values": kv.values,
        "table": kv.table,
        "lengths": kv.lengths,
        "out": torch.zeros(2, 4, 64, dtype=torch.bfloat16),
        "work": workspace(2, 4, 64, 16, torch.device("cpu")),
        "scale": 0.125,
        "on": PLAIN,
    }
    given |= change
    if "q" in change and "out" not in change:
        given["out"] = torch.zeros_like(given["q"]) if isinstance(given["q"], Tensor) else None
    with pytest.raises(ValueError, match=message):
        paged_decode(**given)  # type: ignore[arg-type]
