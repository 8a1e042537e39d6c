import pytest
import torch
from torch import Tensor

from relay.kernels.emulator.compiler import Mode
from relay.kernels.emulator.device import EmulatedDevice
from relay.kernels.kv_scatter_rope import PROGRAMS, kv_scatter_rope, reference
from relay.model import rope
from tests.kernels.paged import same_bits

PLAIN = EmulatedDevice(PROGRAMS)
WATCHED = [program for program in PROGRAMS if ("ELEMENT", "bf16") in program.macros]  # the other differs in conversions only
N_BLOCKS, MAX_BLOCKS = 12, 4


def inputs(n_rows: int, n_heads: int, n_kv_heads: int, head_dim: int, dtype: torch.dtype, block_tokens: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(n_rows + head_dim)
    n_positions = MAX_BLOCKS * block_tokens
    angles = torch.rand(n_positions, head_dim // 2, generator=g) * 100
    slots = torch.randperm(3 * n_positions, generator=g)[:n_rows]  # distinct (sequence, position)
    return {
        "qkv": torch.randn(n_rows, (n_heads + 2 * n_kv_heads) * head_dim, generator=g).to(dtype),
        "cos": angles.cos(),
        "sin": angles.sin(),
        "positions": (slots % n_positions).int(),
        "sequence": (slots // n_positions).int(),
        "table": torch.randperm(N_BLOCKS, generator=g).int().view(3, MAX_BLOCKS),
        "q": torch.full((n_rows, n_heads, head_dim), float("nan"), dtype=dtype),
        "keys": torch.full((N_BLOCKS, n_kv_heads, block_tokens, head_dim), 7.0, dtype=dtype),
        "values": torch.full((N_BLOCKS, n_kv_heads, block_tokens, head_dim), 8.0, dtype=dtype),
    }


def check(given: dict[str, Tensor], on: EmulatedDevice = PLAIN) -> None:
    want = {name: tensor.clone() for name, tensor in given.items()}
    reference(**want)
    kv_scatter_rope(**given, on=on)
    for name in given:
        assert same_bits(given[name], want[name]), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("n_rows", "n_heads", "n_kv_heads", "head_dim", "block_tokens"),
    [
        (0, 1, 1, 64, 16),
        (1, 1, 1, 16, 1),
        (5, 9, 3, 64, 16),
        (3, 7, 1, 96, 8),
        (40, 4, 4, 128, 16),
        (2, 2, 1, 256, 32),
        (2, 40, 8, 128, 16),
    ],
)
def test_every_bit_is_the_references(
    dtype: torch.dtype, n_rows: int, n_heads: int, n_kv_heads: int, head_dim: int, block_tokens: int
) -> None:
    check(inputs(n_rows, n_heads, n_kv_heads, head_dim, dtype, block_tokens))


@pytest.mark.parametrize("mode", ["address", "thread"])
def test_sanitizers_find_nothing(mode: Mode) -> None:
    check(inputs(7, 5, 2, 96, torch.bfloat16, 16), EmulatedDevice(WATCHED, mode))


def test_padding_rows_write_nothing_into_the_pool() -> None:
    given = inputs(6, 4, 2, 64, torch.bfloat16, 16)
    given["sequence"][:] = -1
    keys, values = given["keys"].clone(), given["values"].clone()
    check(given)
    assert same_bits(given["keys"], keys)
    assert same_bits(given["values"], values)


def test_rows_do_not_depend_on_the_batch() -> None:
    given = inputs(9, 4, 2, 64, torch.bfloat16, 16)
    together = {name: tensor.clone() for name, tensor in given.items()}
    kv_scatter_rope(**together, on=PLAIN)
    for rows in ([4], [8, 0], [1, 2, 3, 5, 6, 7]):
        some = {name: given[name][rows].contiguous() for name in ("qkv", "positions", "sequence", "q")}
        kv_scatter_rope(**{**given, **some}, on=PLAIN)
        assert same_bits(some["q"], together["q"][rows])
    assert same_bits(given["keys"], together["keys"])
    assert same_bits(given["values"], together["values"])


def test_the_reference_turns_as_the_model_does() -> None:
    given = inputs(5, 4, 2, 64, torch.float16, 16)
    reference(**given)
    positions = given["positions"].long()
    cos, sin = given["cos"][positions].t().contiguous(), given["sin"][positions].t()
    heads = given["qkv"].view(5, -1, 64)[:, :4].float().permute(1, 2, 0)
    assert same_bits(rope.rotate(heads, (cos, torch.stack((-sin, sin)))).permute(2, 0, 1).half(), given["q"])


@pytest.mark.parametrize(
    ("name", "bad", "message"),
    [
        ("qkv", torch.zeros(2, 100, dtype=torch.bfloat16), r"expected \[2, 512\]"),
        ("sin", torch.zeros(64, 16), r"sin has shape \[64, 16\]"),
        ("positions", torch.zeros(2, dtype=torch.int64), "positions is torch.int64"),
        ("values", torch.zeros(12, 2, 16, 64), "values is torch.float32"),
    ],
)
def test_what_does_not_fit_is_refused(name: str, bad: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kv_scatter_rope(**{**inputs(2, 4, 2, 64, torch.bfloat16, 16), name: bad}, on=PLAIN)
