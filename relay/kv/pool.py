"""What everything above a runner may do with a KV pool, wherever its bytes are.

Three of the transport's five calls are in `relay.kv.pools`: export, open, close. Push and complete are the runner's, which copies layers as
they are computed: a step has not ended before its copies have.
"""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from relay.kv.layout import KVLayout
from relay.messages import PoolHandle


class KVPool(Protocol):
    """`handle`: how other processes open it; None where they are given a descriptor."""

    layout: KVLayout
    handle: PoolHandle | None

    def copy_block(self, source: int, target: int) -> None:
        """All of one block into another of this pool."""
        ...

    def checksums(self, blocks: NDArray[np.int32]) -> NDArray[np.uint64]:
        """[n_layers, len(blocks)]: `relay.kv.checksum` of each."""
        ...

    def flip_bit(self, block: int) -> None:
        """Damage it, for chaos tests."""
        ...
