"""Sequences whose KV somebody else wrote, until it is verified: in parts, so that those that run wait for a step's length at most.

In: sequences with the checksums of their writer. Out: each in the order of its coming, with what is wrong with it, if anything is.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from relay.engine.sequence import Sequence, SequenceId
from relay.kv.pool import KVPool


@dataclass(slots=True)
class _Arrival:
    """blocks: int32 [n] to check; sent: uint64 [n_layers, n]; of these `n_done` are right."""

    sequence: Sequence
    blocks: NDArray[np.int32]
    sent: NDArray[np.uint64]
    n_done: int = 0


class Arrivals:
    def __init__(self, memory: KVPool) -> None:
        self._memory = memory
        self._waiting: dict[SequenceId, _Arrival] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, sequence: Sequence, checksums: bytes, n_checked: int) -> None:
        """checksums: uint64 [n_layers, n_checked], of the last blocks of what it has computed."""
        layout = self._memory.layout
        n = layout.blocks_for(sequence.n_computed)
        blocks = np.asarray(sequence.blocks[n - n_checked : n], dtype=np.int32)
        sent = np.frombuffer(checksums, dtype=np.uint64, count=layout.n_layers * n_checked).reshape(layout.n_layers, n_checked)
        self._waiting[sequence.id] = _Arrival(sequence, blocks, sent)

    def remove(self, sequence_id: SequenceId) -> Sequence | None:
        arrival = self._waiting.pop(sequence_id, None)
        return arrival.sequence if arrival is not None else None

    def verified(self, n_blocks: float) -> Iterator[tuple[Sequence, str]]:
        """Look at so many blocks more. Whoever is through has left, with what is wrong with it: nothing, or in which layer."""
        for arrival in list(self._waiting.values()):
            end = int(min(len(arrival.blocks), arrival.n_done + n_blocks))
            n_blocks -= end - arrival.n_done
            damaged = self._look(arrival, end)
            if damaged or end == len(arrival.blocks):
                del self._waiting[arrival.sequence.id]
                yield arrival.sequence, damaged

    def _look(self, arrival: _Arrival, end: int) -> str:
        begin, arrival.n_done = arrival.n_done, end
        if begin == end:
            return ""
        differs = self._memory.checksums(arrival.blocks[begin:end]) != arrival.sent[:, begin:end]
        if not differs.any():
            return ""
        layer, block = (int(x[0]) for x in np.nonzero(differs))
        return f"the checksum of layer {layer}, block {begin + block} of {len(arrival.blocks)} differs"
