"""What every launcher promises: it refuses what its kernel cannot take, by name, and on the way to a launch does nothing but that."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from relay.kernels.cuda_library import Argument, Grid, Launch
from relay.kernels.cuda_programs import PROGRAMS
from relay.kernels.exact_matmul import exact_matmul
from relay.kernels.kv_scatter_rope import kv_scatter_rope
from relay.kernels.kv_transfer import kv_checksums, kv_transfer
from relay.kernels.paged_decode import Workspace, paged_decode, workspace
from relay.kernels.paged_prefill import paged_prefill
from relay.kernels.quant_matvec import Packed, quant_matvec
from relay.kernels.quant_packing import pack_int8
from relay.kernels.rms_norm import rms_norm
from relay.kernels.sample_tokens import ROW, drawn, sample_tokens, tally_tokens
from relay.kernels.silu_mul import silu_mul
from tests.kernels.paged import paged

CPU = torch.device("cpu")


class Noted:
    """A device that keeps what it was asked to launch, as a graph that is being captured does."""

    def __init__(self) -> None:
        self.launches: list[tuple[Launch, Grid, int, tuple[Any, ...], int]] = []

    @property
    def type(self) -> str:
        return "cpu"

    def launch(self, what: Launch, grid: Grid, block: int, arguments: Sequence[Argument], shared: int = 0) -> None:
        baked = tuple(a.data_ptr() if isinstance(a, Tensor) else None if a is None else (a.dtype.name, a.item()) for a in arguments)
        self.launches.append((what, grid, block, baked, shared))


class NothingOfTorch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Any operation of torch is an allocation, a launch or a wait that a captured graph must not have."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"a launcher calls {func}")


def half(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def wide(*shape: int) -> Tensor:
    return torch.zeros(shape)


def whole(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def pages() -> Tensor:
    return half(6, 2, 16, 64)


def pool() -> Tensor:
    return whole(2, 2, 5, 64, dtype=torch.int64)


ATTENTION: dict[str, Any] = {"q": half(3, 4, 64), "keys": pages(), "values": pages(), "table": whole(3, 2), "lengths": whole(3)}
CASES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "paged_decode": (paged_decode, ATTENTION | {"out": half(3, 4, 64), "work": workspace(3, 4, 64, 600, CPU), "scale": 0.125}),
    "paged_prefill": (paged_prefill, ATTENTION | {"out": half(3, 4, 64), "starts": whole(4), "n_most": 2, "scale": 0.125}),
    "kv_scatter_rope": (
        kv_scatter_rope,
        {"qkv": half(3, 8 * 64), "cos": wide(32, 32), "sin": wide(32, 32), "positions": whole(3), "sequence": whole(3)}
        | {"table": whole(3, 2), "q": half(3, 4, 64), "keys": pages(), "values": pages()},
    ),
    "kv_transfer": (
        kv_transfer,
        {"source": pool(), "source_blocks": whole(3), "target": pool(), "target_blocks": whole(3), "layers": range(2)}
        | {"checksums": whole(2, 3, dtype=torch.int64)},
    ),
    "kv_checksums": (
        kv_checksums,
        {"source": pool(), "blocks": whole(3), "layers": range(2), "checksums": whole(2, 3, dtype=torch.int64)},
    ),
    "rms_norm": (rms_norm, {"x": half(3, 64), "residual": half(3, 64), "weight": half(64), "out": half(3, 64), "eps": 1e-5}),
    "silu_mul": (silu_mul, {"gate_up": half(3, 128), "out": half(3, 64)}),
    "sample_tokens": (
        sample_tokens,
        {"logits": wide(3, 100), "rows": whole(3, ROW.itemsize, dtype=torch.uint8), "bias_ids": whole(2), "biases": wide(2)}
        | {"to": drawn(4, 100, CPU), "tallies": whole(2, 100), "masks": whole(2, 4)},
    ),
    "tally_tokens": (
        tally_tokens,
        {"tokens": whole(9), "begins": whole(4), "n_prompt": whole(3), "slots": whole(3), "tallies": whole(3, 100)},
    ),
    "quant_matvec": (
        quant_matvec,
        {"packed": pack_int8(whole(32, 128, dtype=torch.int8), wide(32)), "x": half(3, 128), "out": half(3, 32)},
    ),
    "exact_matmul": (exact_matmul, {"x": half(3, 64), "w": half(32, 64), "bias": half(32), "out": half(3, 32)}),
}
TENSORS = [(case, name) for case, (_, given) in CASES.items() for name, value in given.items() if isinstance(value, Tensor)]


def misaligned(tensor: Tensor) -> Tensor:
    return torch.zeros(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape)


def strided(tensor: Tensor) -> Tensor:
    return torch.zeros(*tensor.shape, 2, dtype=tensor.dtype)[..., 0]


def launched(case: str, **change: Any) -> list[tuple[Launch, Grid, int, tuple[Any, ...], int]]:
    run, given = CASES[case]
    device = Noted()
    run(**(given | change), on=device)
    return device.launches


@pytest.mark.parametrize("case", CASES)
def test_a_launch_calls_nothing_of_torch_and_is_the_same_again(case: str) -> None:
    with NothingOfTorch():  # type: ignore[no-untyped-call]
        first = launched(case)
        assert launched(case) == first
    assert len(first) == (2 if case == "paged_decode" else 1)
    for what, grid, block, _, shared in first:
        assert what.program in PROGRAMS
        assert min(grid) >= 1
        assert block <= 1024
        assert shared <= 227 << 10


@pytest.mark.parametrize(("case", "name"), TENSORS)
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (misaligned, r"{0} lies at an address that is no multiple of 16"),
        (strided, r"{0} has strides"),
        (lambda tensor: tensor.to(torch.complex64), r"{0} is torch\.complex64; expected torch\."),
        (lambda tensor: tensor[None], r"has shape|has \d dimensions"),
    ],
    ids=["misaligned", "strided", "dtype", "shape"],
)
def test_a_tensor_that_does_not_fit_is_refused_by_name(case: str, name: str, wrong: Callable[[Tensor], Tensor], message: str) -> None:
    called = "source_blocks" if (case, name) == ("kv_checksums", "blocks") else name
    with pytest.raises(ValueError, match=message.format(called)):
        launched(case, **{name: wrong(CASES[case][1][name])})


@pytest.mark.parametrize("part", ["codes", "records"])
def test_packed_weights_that_do_not_fit_are_refused_by_name(part: str) -> None:
    packed: Packed = CASES["quant_matvec"][1]["packed"]
    tensor: Tensor = getattr(packed, part)
    short: dict[str, Any] = {part: tensor[:-16].clone()}
    with pytest.raises(ValueError, match=f"{part} has shape"):
        launched("quant_matvec", packed=replace(packed, **short))
    moved: dict[str, Any] = {part: misaligned(tensor)}
    with pytest.raises(ValueError, match=f"{part} lies at an address"):
        launched("quant_matvec", packed=replace(packed, **moved))


def test_what_lengths_say_changes_no_launch() -> None:
    """So that a graph holds for any: only the tensors' sizes set the grid."""
    before = launched("paged_decode") + launched("paged_prefill")
    lengths: Tensor = ATTENTION["lengths"]
    lengths[:] = torch.tensor([5, 0, 31])
    assert launched("paged_decode") + launched("paged_prefill") == before
    lengths[:] = 0


def test_scalars_have_the_types_of_the_kernels() -> None:
    for case in CASES:
        for what, _, _, arguments, _ in launched(case):
            source = what.program.path.read_text()
            head = source[source.index(f" {what.kernel}(") :].partition(")")[0].partition("(")[2]
            kinds = [" ".join(parameter.split()) for parameter in head.split(",")]
            assert len(kinds) == len(arguments), what.kernel
            for kind, argument in zip(kinds, arguments, strict=True):
                if "*" in kind:
                    assert argument is None or isinstance(argument, int), (what.kernel, kind)
                else:
                    assert np.dtype(argument[0]) == {"int": np.int32, "float": np.float32}[kind.split()[0]], (what.kernel, kind)


def test_arguments_beyond_what_a_launch_can_say_are_refused() -> None:
    on = Noted()
    kv = paged([5, 6], n_kv_heads=2, head_dim=64, dtype=torch.bfloat16)
    q = torch.zeros(2, 4, 64, dtype=torch.bfloat16)
    work = workspace(2, 4, 64, 16, CPU)

    def decode(keys: Tensor = kv.keys, work: Workspace = work, window: int = 0) -> None:
        paged_decode(q, keys, keys, kv.table, kv.lengths, torch.empty_like(q), work, scale=0.125, window=window, on=on)

    with pytest.raises(ValueError, match="4 heads on 0 K/V heads"):
        decode(kv.keys[:, :0].contiguous())
    with pytest.raises(ValueError, match="window 2147483648"):
        decode(window=2**31)
    with pytest.raises(ValueError, match="with 0 splits"):
        decode(work=Workspace(torch.empty(2, 4, 0, 64), torch.empty(2, 4, 0, 2)))
    many = torch.zeros(70_000, 1, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="70000 sequences"):
        paged_decode(
            many,
            kv.keys[:, :1].contiguous(),
            kv.keys[:, :1].contiguous(),
            torch.zeros(70_000, 1, dtype=torch.int32),
            torch.zeros(70_000, dtype=torch.int32),
            many,
            work,
            scale=0.125,
            on=on,
        )
    x = torch.zeros(8, 16, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="tiles of 5 rows"):
        exact_matmul(x, x, torch.zeros(8, 8, dtype=torch.bfloat16), rows=5, on=on)
    with pytest.raises(ValueError, match="activation relu"):
        silu_mul(x, torch.zeros(8, 8, dtype=torch.bfloat16), activation="relu", on=on)  # type: ignore[arg-type]
    assert on.launches == []
