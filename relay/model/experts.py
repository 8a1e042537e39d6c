"""The network of a layer that has many: each token goes through the few that its router chooses, whoever it shares the step with.

The router's scores are computed in tiles, and what follows from a row's scores is a function of them alone: the order of equal scores is
that of the experts' numbers. The rows that chose an expert are packed into new tiles, in which a row's result does not depend on its place
(`relay.model.tile`), and a row adds up its experts in the order of their numbers.
Source: https://arxiv.org/abs/2401.04088 (Mixtral): softmax over the chosen scores.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from relay.model.tile import TILE_ROWS, TiledMatrix

Network = Callable[[Sequence[Tensor]], list[Tensor]]  # [hidden, TILE_ROWS] each -> the same


class Experts:
    """A router and its networks. n_used, renormalized: as in `ModelSpec`."""

    def __init__(self, router: Tensor, networks: Sequence[Network], *, n_used: int, renormalized: bool) -> None:
        self._router = TiledMatrix(router)
        self._networks = networks
        self._n_used, self._renormalized = n_used, renormalized

    def __call__(self, tiles: Sequence[Tensor], n_rows: int) -> list[Tensor]:
        """tiles: float32 [hidden, TILE_ROWS] each, of which the first `n_rows` rows in all are no padding -> the same shapes."""
        routes = [self._route(scores.t().contiguous()) for scores in self._router(tiles)]
        chosen = torch.cat([ids for ids, _ in routes])[:n_rows]
        shares = torch.cat([shares for _, shares in routes])[:n_rows]
        rows = torch.cat([tile.t() for tile in tiles])
        mixed = torch.zeros_like(rows)
        for number, network in enumerate(self._networks):
            places, ranks = (chosen == number).nonzero(as_tuple=True)
            if len(places):
                out = self._apply(network, rows, places)
                mixed.index_add_(0, places, out.mul_(shares[places, ranks][:, None]))
        return [tile.t() for tile in torch.split(mixed, TILE_ROWS)]

    def _route(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """scores: float32 [TILE_ROWS, n_experts] -> the chosen experts and their shares: int64 and float32 [TILE_ROWS, n_used]."""
        chosen = scores.sort(stable=True, dim=-1, descending=True).indices[:, : self._n_used]
        weights = scores.sub(scores.amax(-1, keepdim=True)).exp_()
        shares = weights.gather(-1, chosen)
        return chosen, shares.div(shares.sum(-1, keepdim=True) if self._renormalized else weights.sum(-1, keepdim=True))

    def _apply(self, network: Network, rows: Tensor, places: Tensor) -> Tensor:
        """One network on some rows, in tiles filled up with the last of them -> [len(places), hidden]."""
        filled = torch.cat((places, places[-1:].expand(-len(places) % TILE_ROWS)))
        tiles = [tile.t() for tile in torch.split(rows[filled], TILE_ROWS)]
        return torch.cat([out.t() for out in network(tiles)])[: len(places)]
