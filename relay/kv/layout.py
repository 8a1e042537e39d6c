"""How a pool's bytes are laid out. Two pools exchange blocks only if their layout ids are equal.

Reference layout: `[n_layers, 2 (K, V), n_blocks, n_kv_heads, block_tokens, head_dim]`, one allocation. A runner may order the bytes inside
one (layer, K or V, block) as its kernels like and says so in `order`.
"""

import msgspec

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
_SCALE_BYTES = {"int8": 4}  # for each vector, a float32


class KVLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Shape of one pool; `n_blocks` is not part of the id, since blocks move between pools of different size."""

    n_layers: int
    n_kv_heads: int
    head_dim: int
    block_tokens: int
    dtype: str
    n_blocks: int
    order: str = "token-major"

    @property
    def page_bytes(self) -> int:
        """Bytes of K, or of V, of one block in one layer; what a push copies at a time."""
        vector_bytes = self.head_dim * _ITEM_BYTES[self.dtype] + _SCALE_BYTES.get(self.dtype, 0)
        return self.n_kv_heads * self.block_tokens * vector_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, K and V."""
        return 2 * self.n_layers * self.page_bytes

    @property
    def pool_bytes(self) -> int:
        return self.block_bytes * self.n_blocks

    @property
    def layout_id(self) -> str:
        return f"{self.n_layers}x{self.n_kv_heads}x{self.head_dim}x{self.block_tokens}:{self.dtype}:{self.order}"

    def blocks_for(self, n_tokens: int) -> int:
        """Blocks that hold `n_tokens` tokens."""
        return -(-n_tokens // self.block_tokens)
