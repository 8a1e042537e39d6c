"""The guarded pool: each write is checked where it happens, against the owner's book and the leases that are out.

End states cannot show a write without a right to it: whoever gets the block next writes over it, mostly. (The book's insides are read
here because no actor needs to ask such questions.)
"""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from relay.engine.board import StepBoard
from relay.kv.book import BlockState
from relay.kv.layout import KVLayout
from relay.kv.memory import KVMemory
from relay.kv.pool import KVPool
from relay.kv.pools import Pools
from relay.messages import Address, Key, PoolHandle
from relay.simulation.violation import Violation

if TYPE_CHECKING:
    from relay.simulation.life import Life

UNDER_LEASE = (BlockState.LEASED, BlockState.QUARANTINED)


class GuardedMemory(KVMemory):
    """The pool of one life. A new life has new memory, so what an old one's writers still do lands where nobody reads."""

    def __init__(self, layout: KVLayout, owner: "Life") -> None:
        super().__init__(layout)
        self.owner = owner

    def copy_block(self, source: int, target: int) -> None:
        """Within the pool: only a prefill actor of this worker does that, to a block that it was leased."""
        if self.owner.book._state[target] not in UNDER_LEASE:
            raise Violation("write without a lease", f"{self.owner} copies into block {target}")
        super().copy_block(source, target)

    def computes(self, blocks: list[int], *, borrowed: bool) -> None:
        """The owner's engine is about to write slots of these blocks."""
        book = self.owner.book
        for block in blocks:
            state, readers, published = book._state[block], book._readers[block], block in book._published
            right = state in UNDER_LEASE if borrowed else state is BlockState.RUNNING and readers == 1
            if not right or published:
                text = f"{self.owner} computes in block {block}: {state.name}, {readers} readers{', published' if published else ''}"
                raise Violation("write without a lease", text)

    def pushed(self, blocks: NDArray[np.int32], writer: "Life", request: Key) -> None:
        """Another life is about to write these blocks."""
        for block in blocks.tolist():
            state = self.owner.book._state[block]
            if state not in UNDER_LEASE:
                raise Violation("write without a lease", f"{writer} pushes {request} into block {block} of {self.owner}: {state.name}")


def simulated_pools(own: GuardedMemory, own_addresses: tuple[Address, ...]) -> Pools:
    """Those of other lives are the pools themselves, as long as this life knows the other to be up."""

    def map_pool(address: Address, handle: PoolHandle | None) -> KVPool | None:
        return next((life.memory for life in own.owner.known if address in life.addresses), None)

    return Pools(own, own_addresses, map_pool)


class MemoryBoard(StepBoard):
    """Who is in the step that runs, where the supervisor of the simulation reads it."""

    def __init__(self) -> None:
        self.notice: tuple[tuple[str, ...], bool] = (), False

    def begin(self, request_ids: list[str], lone: bool) -> None:
        self.notice = tuple(request_ids), lone

    def end(self) -> None:
        self.notice = (), False
