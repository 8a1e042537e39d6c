"""Attempts that are over before all their mail has come. Pure."""

from collections import OrderedDict

from relay.messages import Key

MAX_TOMBSTONES = 65536


class Tombstones:
    """The last so many."""

    def __init__(self, most: int = MAX_TOMBSTONES) -> None:
        self._most = most
        self._keys: OrderedDict[Key, None] = OrderedDict()

    def add(self, key: Key) -> None:
        self._keys[key] = None
        if len(self._keys) > self._most:
            self._keys.popitem(last=False)

    def discard(self, key: Key) -> None:
        self._keys.pop(key, None)

    def __contains__(self, key: Key) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)
