"""What goes into one step: every running sequence's next token, and as much of the waiting prompts as time allows. Pure.

Prompts are taken first come, first served, in chunks; several may share a step, and the last one in gets what is left. With anything
waiting, a step has room for half a tile of prompt at least, so that a full decode batch cannot starve it.
"""

from collections.abc import Iterable
from typing import NamedTuple


class Chunk(NamedTuple):
    """Take `n_tokens` of the waiting prompt number `prompt`."""

    prompt: int
    n_tokens: int


def plan_chunks(lengths: Iterable[int], n_decode_rows: int, budget_rows: int, tile_rows: int, max_chunk_tokens: int) -> list[Chunk]:
    """`lengths`: tokens still to compute of each waiting prompt, in order. Returns what this step computes of them.

    Rows come in tiles: those that a partly filled tile leaves over are free, and are used.
    """
    tiles = max(budget_rows // tile_rows, -(-(n_decode_rows + tile_rows // 2) // tile_rows))
    room = min(tiles * tile_rows - n_decode_rows, max_chunk_tokens)
    chunks = []
    for index, length in enumerate(lengths):
        if room <= 0:
            break
        take = min(length, room)
        chunks.append(Chunk(index, take))
        room -= take
    return chunks


class StepClock:
    """What a tile of rows costs on this machine, learnt as it runs: an exponential mean of milliseconds per tile."""

    def __init__(self, tile_rows: int, max_step_ms: float, first_tile_ms: float) -> None:
        self._tile_rows, self._max_step_ms = tile_rows, max_step_ms
        self.tile_ms = first_tile_ms

    def ran(self, n_rows: int, ms: float) -> None:
        """A step of `n_rows` took `ms`."""
        self.tile_ms += 0.1 * (ms / self.tiles(n_rows) - self.tile_ms)

    def tiles(self, n_rows: int) -> int:
        return max(1, -(-n_rows // self._tile_rows))

    def predict_ms(self, n_rows: int) -> float:
        return self.tile_ms * self.tiles(n_rows) if n_rows else 0.0

    def budget_rows(self) -> int:
        """Rows that fit into `max_step_ms`, one tile at least."""
        return max(1, int(self._max_step_ms / self.tile_ms)) * self._tile_rows
