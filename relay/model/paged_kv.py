"""A KV pool as torch sees it: the same bytes as `KVMemory`, no copy.

Within a layer, the vectors of one head in one block lie together (`page`: [block_tokens, head_dim]), so that gathering a head's context is
a copy of whole pages. Page number = ((K or V) * n_blocks + block) * n_kv_heads + head; slot number = page number * block_tokens + slot.
"""

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from relay.errors import ModelError
from relay.kv.memory import KVMemory

ORDER: Final = "token-major"
_TYPES: Final = {"float32": (np.float32, torch.float32), "bfloat16": (np.int16, torch.bfloat16)}


class PagedKV:
    """Reads and writes one pool. Raises ModelError for a layout that it cannot compute on."""

    def __init__(self, memory: KVMemory) -> None:
        layout = memory.layout
        if layout.dtype not in _TYPES or layout.order != ORDER:
            raise ModelError(
                f"a KV pool of {layout.dtype} in {layout.order} order is not for this runner; expected {' or '.join(_TYPES)}, {ORDER}"
            )
        self.layout = layout
        carrier, self._dtype = _TYPES[layout.dtype]
        pool = torch.from_numpy(memory.pages.view(carrier)).view(self._dtype)
        self._slots = pool.view(layout.n_layers, -1, layout.head_dim).unbind()
        self._pages = pool.view(layout.n_layers, -1, layout.block_tokens * layout.head_dim).unbind()

    def pages(self, blocks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Block numbers [rows, n] -> page numbers [2 (K, V), rows, n_kv_heads, n]."""
        layout = self.layout
        sides, heads = np.arange(2)[:, None, None, None], np.arange(layout.n_kv_heads)[:, None]
        return np.asarray((sides * layout.n_blocks + blocks[:, None, :]) * layout.n_kv_heads + heads)

    def write(self, layer: int, slots: Tensor, vectors: Tensor) -> None:
        """slots: int64 [n], distinct. vectors: float32 [n, head_dim], rounded to the pool's type."""
        self._slots[layer].index_copy_(0, slots, vectors.to(self._dtype))

    def gather(self, layer: int, pages: Tensor) -> Tensor:
        """pages: int64 [n] -> float32 [n * block_tokens, head_dim], a copy."""
        return self._pages[layer].index_select(0, pages).float().view(-1, self.layout.head_dim)
