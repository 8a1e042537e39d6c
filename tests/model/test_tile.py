"""Matrices of any height in tiles: a row's result depends on no mate, place or thread."""

from collections.abc import Iterator

import pytest
import torch

from relay.model.tile import TILE_ROWS, TiledMatrix, gelu_tanh_gate, silu_gate, soft_cap


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("n_out", [1, 2, 3, 5, 6, 7, 8, 9, 10, 11, 16, 60, 63, 64, 65, 127])
def test_low_matrices_are_exact_over_threads_and_places(n_out: int) -> None:
    """Routers are low. With 5, 6, 7, 9 and 10 rows the BLAS below summed differently on one thread and on two."""
    generator = torch.Generator().manual_seed(n_out)
    weight, rows = torch.randn(n_out, 64, generator=generator), torch.randn(TILE_ROWS, 64, generator=generator)
    order = torch.randperm(TILE_ROWS, generator=generator)
    torch.set_num_threads(1)
    (right,) = TiledMatrix(weight)([rows.t()])
    assert right.shape == (n_out, TILE_ROWS)
    assert torch.allclose(right, weight @ rows.t(), atol=1e-4)
    for n_threads in (1, 2, 3):
        torch.set_num_threads(n_threads)
        same, moved = TiledMatrix(weight)([rows.t(), rows[order].t()])
        assert torch.equal(same, right)
        assert torch.equal(moved, right[:, order])


@pytest.mark.parametrize("n_out", [64, 511, 512, 517, 1023, 1030])
def test_chunks_cover_a_matrix_and_none_is_low(n_out: int) -> None:
    weight = torch.randn(n_out, 4096)
    rows = torch.randn(TILE_ROWS, 4096)
    matrix = TiledMatrix(weight)
    assert min(len(chunk) for chunk in matrix._chunks) >= 64
    assert torch.allclose(matrix([rows.t()])[0], weight @ rows.t(), atol=1e-2)


def test_gates_and_caps_are_what_torch_computes_and_stay_finite() -> None:
    x = torch.cat((torch.linspace(-12, 12, 999), torch.tensor([-1e4, 1e4, 0.0])))[:, None]
    up = torch.full_like(x, 2.0)
    for gate, right in (
        (silu_gate, torch.nn.functional.silu(x)),
        (gelu_tanh_gate, torch.nn.functional.gelu(x, approximate="tanh")),
    ):
        assert torch.allclose(gate(torch.cat((x, up))), 2 * right, atol=2e-6)
    assert torch.allclose(soft_cap(x.clone(), 30.0), 30 * torch.tanh(x / 30), atol=1e-5)
    assert torch.isfinite(soft_cap(torch.tensor([1e38, -1e38]), 30.0)).all()
