"""Records for tests of what is made of them."""

from array import array
from typing import Any

from relay.bench.record import Record


def record(start_s: float = 0.0, chunks: tuple[float, ...] = (1.0, 1.5, 2.0), end_s: float = 2.25, **fields: Any) -> Record:
    """`chunks` and `end_s` are after `start_s`."""
    values: dict[str, Any] = {"index": 0, "sent_s": start_s, "asked_prompt_tokens": 10, "asked_output_tokens": len(chunks), **fields}
    return Record(start_s=start_s, end_s=start_s + end_s, chunk_s=array("d", [start_s + at for at in chunks]), **values)
