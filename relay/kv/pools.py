"""Other workers' pools, mapped: the `open` and `close` of the shared-memory transport. Pushing is the runner's, layer by layer."""

import os
from collections.abc import Callable

import msgspec

from relay.kv.layout import KVLayout
from relay.kv.memory import KVMemory
from relay.messages import Address


class Pools:
    """`own` serves the actors of this worker: ownership moves there and no bytes. `fd_of` gives the memfd that a life shares, or None."""

    def __init__(self, own: KVMemory, own_addresses: tuple[Address, ...], fd_of: Callable[[Address], int | None]) -> None:
        self._own, self._fd_of = own, fd_of
        self._open: dict[Address, KVMemory] = dict.fromkeys(own_addresses, own)

    def open(self, address: Address) -> KVMemory | None:
        """The pool of that life of a decode worker; None if it is gone. Pools of one server share a layout, but for their size."""
        if address not in self._open:
            memory = self._map(address)
            if memory is None:
                return None
            self._open[address] = memory
        return self._open[address]

    def close(self, address: Address) -> None:
        """That life has ended. The mapping goes when the last push into it has."""
        if self._open.get(address) is not self._own:
            self._open.pop(address, None)

    def _map(self, address: Address) -> KVMemory | None:
        """A simulation gives the pool itself."""
        fd = self._fd_of(address)
        return KVMemory(_sized(self._own.layout, os.fstat(fd).st_size), os.dup(fd)) if fd is not None else None


def _sized(layout: KVLayout, n_bytes: int) -> KVLayout:
    return msgspec.structs.replace(layout, n_blocks=n_bytes // layout.block_bytes)
