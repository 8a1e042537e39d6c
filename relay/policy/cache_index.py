"""What the router believes of each worker's prefix cache, and how workers tell it.

A hint: 8 bytes of a block's key. It may be stale or collide; the worker's own match decides, and a wrong guess costs time only. Links lose
nothing between two lives, so a snapshot at `Announced` and changes in order are enough; a new life begins with an empty cache, and what its
predecessor said may still be on its way: changes name their epoch.
"""

from collections.abc import Container, Iterable, Sequence

from relay.kv.book import BlockBook
from relay.kv.prefix import HINT_BYTES, BlockKey
from relay.messages import Cached


def hints(keys: Iterable[BlockKey]) -> bytes:
    """Keys as they travel."""
    return b"".join(key[:HINT_BYTES] for key in keys)


def news(worker: str, epoch: int, book: BlockBook) -> Cached | None:
    """What is new of a cache, to be told to the router; None if nothing is. Without a router it is lost: the next one gets a snapshot."""
    changes = book.take_changes()
    if not (changes.added or changes.removed):
        return None
    return Cached(worker=worker, epoch=epoch, added=hints(changes.added), removed=hints(changes.removed))


class CacheIndex:
    """Of one worker."""

    def __init__(self, snapshot: bytes = b"") -> None:
        self._hints = dict.fromkeys(_split(snapshot))

    def change(self, added: bytes, removed: bytes) -> None:
        for hint in _split(removed):
            self._hints.pop(hint, None)
        for hint in _split(added):
            self._hints[hint] = None

    def __contains__(self, hint: object) -> bool:
        return hint in self._hints

    def n_blocks(self, keys: Sequence[BlockKey], coming: Container[bytes] = ()) -> int:
        """How many of `keys`, from the first on, are likely there, or `coming`: hints of what is being computed."""
        for i, key in enumerate(keys):
            hint = key[:HINT_BYTES]
            if hint not in self._hints and hint not in coming:
                return i
        return len(keys)

    def __len__(self) -> int:
        return len(self._hints)


def _split(joined: bytes) -> list[bytes]:
    return [joined[at : at + HINT_BYTES] for at in range(0, len(joined), HINT_BYTES)]
