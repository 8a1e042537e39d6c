"""How large a step of a device worker can be: what its buffers and graphs are made for. No torch: plans are made with it."""

from dataclasses import dataclass
from typing import Final

_LEAST_ROWS: Final = 64  # the probe at start has 32


@dataclass(frozen=True, slots=True)
class StepLimits:
    """max_running: sequences that decode. max_chunk_tokens: prompt rows. max_context: keys of one sequence."""

    max_running: int
    max_chunk_tokens: int
    max_context: int

    @property
    def max_rows(self) -> int:
        return max(self.max_running + self.max_chunk_tokens, _LEAST_ROWS)

    @property
    def logit_rows(self) -> int:
        """Drawn at once; a prompt whose tokens are scored goes through in parts."""
        return self.max_running

    def max_blocks(self, block_tokens: int) -> int:
        """Of one sequence: one more than its keys need, for growth."""
        return -(-self.max_context // block_tokens) + 1
