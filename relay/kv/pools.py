"""Other workers' pools, opened once each: the transport's `open` and `close`. Its `export` is what a pool's owner tells: a descriptor that
the root passes on, or a handle in each `Prefill`; `push` and `complete` are the runner's, layer by layer."""

import os
from collections.abc import Callable

import msgspec

from relay.kv.layout import KVLayout
from relay.kv.memory import KVMemory
from relay.kv.pool import KVPool
from relay.messages import Address, PoolHandle

Map = Callable[[Address, PoolHandle | None], KVPool | None]


class Pools:
    """`own` serves the actors of this worker: ownership moves there and no bytes. `map_pool` gives that of another life, None if it is
    gone."""

    def __init__(self, own: KVPool, own_addresses: tuple[Address, ...], map_pool: Map) -> None:
        self._own, self._map_pool = own, map_pool
        self._open: dict[Address, KVPool] = dict.fromkeys(own_addresses, own)

    def open(self, address: Address, handle: PoolHandle | None) -> KVPool | None:
        """The pool of that life of a decode worker; None if it is gone, or `handle` is of another life."""
        if address not in self._open:
            if handle is not None and handle.epoch != address.epoch:
                return None
            pool = self._map_pool(address, handle)
            if pool is None:
                return None
            self._open[address] = pool
        return self._open[address]

    def close(self, address: Address) -> None:
        """That life has ended. The mapping goes when the last push into it has."""
        if self._open.get(address) is not self._own:
            self._open.pop(address, None)

    @property
    def open_addresses(self) -> list[Address]:
        return list(self._open)


def shared_memory(layout: KVLayout, fd_of: Callable[[Address], int | None]) -> Map:
    """Pools of one server share a layout, but for their size. `fd_of` gives the memfd that a life shares, or None."""

    def map_pool(address: Address, handle: PoolHandle | None) -> KVPool | None:
        fd = fd_of(address)
        return KVMemory(_sized(layout, os.fstat(fd).st_size), os.dup(fd)) if fd is not None else None

    return map_pool


def _sized(layout: KVLayout, n_bytes: int) -> KVLayout:
    return msgspec.structs.replace(layout, n_blocks=n_bytes // layout.block_bytes)
