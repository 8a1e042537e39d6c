"""What goes into one step: every running sequence's next token, and as much of the waiting prompts as time allows. Pure.

Prompts are taken first come, first served, in chunks; several may share a step, and the last one in gets what is left. With anything
waiting, a step has room for some rows of prompt at least, so that a full decode batch cannot starve it.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

LEAST_PROMPT_ROWS = 8
LEAST_BUDGET_ROWS = 16
FEW_ROWS = 16  # up to so many a step is small: mostly, it waits for the weights


class Chunk(NamedTuple):
    """Take `n_tokens` of the waiting prompt number `prompt`."""

    prompt: int
    n_tokens: int


def plan_chunks(lengths: Iterable[int], n_decode_rows: int, budget_rows: int, tile_rows: int, max_chunk_tokens: int) -> list[Chunk]:
    """`lengths`: tokens still to compute of each waiting prompt, in order. Returns what this step computes of them.

    Rows come in tiles: those that a partly filled tile leaves over are free, and are used.
    """
    least = max(tile_rows // 2, LEAST_PROMPT_ROWS)
    tiles = max(budget_rows // tile_rows, -(-(n_decode_rows + least) // tile_rows))
    room = min(tiles * tile_rows - n_decode_rows, max_chunk_tokens)
    chunks = []
    for index, length in enumerate(lengths):
        if room <= 0:
            break
        take = min(length, room)
        chunks.append(Chunk(index, take))
        room -= take
    return chunks


class _Anchor:
    """The usual step of a kind: exponential means of its tiles and milliseconds."""

    def __init__(self, tiles: float, ms: float) -> None:
        self.tiles, self.ms = tiles, ms

    def saw(self, tiles: int, ms: float) -> None:
        self.tiles += 0.1 * (tiles - self.tiles)
        self.ms += 0.1 * (ms - self.ms)


class StepClock:
    """What steps cost on this machine, learnt as it runs: a line through the usual small step and the usual large one.

    A step of few rows waits for the weights, whatever their number; one of many computes. So there is a part for any step, and one a tile;
    and one for attention, `kv_ms` for each pair of a row and a token that it looks back at: as measured at the start, and less where a step
    takes less than that alone would.
    """

    def __init__(
        self,
        tile_rows: int,
        max_step_ms: float,
        tile_ms: float,
        fixed_ms: float = 0.0,
        kv_ms: float = 0.0,
        max_prefill_step_ms: float | None = None,
    ) -> None:
        """max_prefill_step_ms: of a step that holds up no stream; None for no difference."""
        self._tile_rows, self._max_step_ms, self._kv_ms = tile_rows, max_step_ms, kv_ms
        self._max_prefill_step_ms = max_step_ms if max_prefill_step_ms is None else max_prefill_step_ms
        many = self.tiles(2 * FEW_ROWS)
        self._few, self._many = _Anchor(1, fixed_ms + tile_ms), _Anchor(many, fixed_ms + tile_ms * many)

    def ran(self, n_rows: int, n_kv_tokens: int, ms: float) -> None:
        """A step of `n_rows` that looked at `n_kv_tokens`, summed over rows, took `ms`."""
        if n_kv_tokens:
            self._kv_ms = min(self._kv_ms, ms / n_kv_tokens)
        (self._few if n_rows <= FEW_ROWS else self._many).saw(self.tiles(n_rows), max(ms - self._kv_ms * n_kv_tokens, 0.1 * ms))

    def tiles(self, n_rows: int) -> int:
        return max(1, -(-n_rows // self._tile_rows))

    def predict_ms(self, n_rows: int, n_kv_tokens: int) -> float:
        fixed_ms, tile_ms = self._line()
        return fixed_ms + tile_ms * self.tiles(n_rows) + self._kv_ms * n_kv_tokens if n_rows else 0.0

    def budget_rows(self, n_before: int = 0, *, alone: bool = False) -> int:
        """Rows behind `n_before` tokens that fit into a step, sixteen and a tile at least. alone: it holds up no stream."""
        fixed_ms, tile_ms = self._line()
        # t tiles of r rows cost t (tile + r n kv) + (t r)^2 / 2 kv
        linear, square = tile_ms + self._tile_rows * n_before * self._kv_ms, self._tile_rows**2 * self._kv_ms / 2
        left_ms = max((self._max_prefill_step_ms if alone else self._max_step_ms) - fixed_ms, 0.0)
        tiles = int(2 * left_ms / (linear + math.sqrt(linear**2 + 4 * square * left_ms)))
        return max(max(tiles, 1) * self._tile_rows, LEAST_BUDGET_ROWS)

    def _line(self) -> tuple[float, float]:
        few, many = self._few, self._many
        tile_ms = max((many.ms - few.ms) / max(many.tiles - few.tiles, 1e-9), 0.01 * many.ms / many.tiles, 1e-6)
        return max(few.ms - tile_ms * few.tiles, 0.0), tile_ms
