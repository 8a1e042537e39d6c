"""The tokens of running sequences as arrays that penalties can count: each list is converted once and then only what was added to it.

A sequence's list grows at its end and is otherwise left alone (`relay.engine.runner.Draw`). An entry holds the list itself, so no other
list can have its identity, and goes after the first step that does not ask for it.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(slots=True)
class _Entry:
    tokens: list[int]
    array: NDArray[np.int32]
    n_filled: int
    asked: bool = True


class TokenArrays:
    """Used by one thread."""

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}

    def address(self, tokens: list[int]) -> int:
        """Of int32 [len(tokens)]; good until the end of the step."""
        entry, n = self._entries.get(id(tokens)), len(tokens)
        if entry is None or entry.n_filled > n or n > len(entry.array):
            array = np.empty(max(64, 2 * n), np.int32)
            entry = self._entries[id(tokens)] = _Entry(tokens, array, 0)
        entry.array[entry.n_filled : n] = tokens[entry.n_filled :]
        entry.n_filled, entry.asked = n, True
        return entry.array.ctypes.data

    def end_step(self) -> None:
        """Forget what this step did not ask for."""
        if self._entries:
            self._entries = {key: entry for key, entry in self._entries.items() if entry.asked}
            for entry in self._entries.values():
                entry.asked = False
