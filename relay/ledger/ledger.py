"""One request's ledger: a cursor that moves through its life and leaves each nanosecond in one slot.

`close(span, t)` gives everything since the cursor to `span`. There are no start stamps, so spans cannot overlap and nothing falls between
two; the spans sum to the wall time by construction. Work that ran beside the request's path (the next token computed while this one is
written, another choice of the same request) comes as a trail and enters by `fold`, which counts only what lies after the cursor.
"""

from relay.ledger.spans import N_SPANS, Span
from relay.messages import Trail

_ALL = tuple(Span)


class Ledger:
    """Owned by one task at a time; integers only, nothing allocated per token."""

    __slots__ = ("_slots", "cursor_ns", "first_byte_ns", "start_ns", "ttft_slots", "violations")

    def __init__(self, start_ns: int) -> None:
        self.start_ns = start_ns
        self.cursor_ns = start_ns
        self._slots = [0] * N_SPANS
        self.first_byte_ns = 0
        self.ttft_slots: list[int] | None = None
        self.violations = 0  # stamps before the cursor where none may be: counted, never clamped in silence

    def close(self, span: Span, t_ns: int) -> None:
        """What happened since the cursor was `span`; it ended at `t_ns`, now or earlier in this process."""
        if t_ns < self.cursor_ns:
            self.violations += 1
            return
        self._slots[span] += t_ns - self.cursor_ns
        self.cursor_ns = t_ns

    def fold(self, trail: Trail) -> None:
        """Take in what another actor says of the way here: only the part after the cursor was waited for."""
        cursor, slots = self.cursor_ns, self._slots
        for span, end in trail:
            if end > cursor:
                slots[span] += end - cursor
                cursor = end
        self.cursor_ns = cursor

    def first_byte(self) -> None:
        """The first byte of the answer has gone: the same ledger, cut here, explains TTFT."""
        if self.ttft_slots is None:
            self.first_byte_ns = self.cursor_ns
            self.ttft_slots = list(self._slots)

    def __getitem__(self, span: Span) -> int:
        return self._slots[span]

    @property
    def wall_ns(self) -> int:
        return self.cursor_ns - self.start_ns

    def spans(self) -> dict[str, int]:
        """Every span that took time, and `unaccounted`, by name; they sum to `wall_ns`."""
        return _named(self._slots)

    def ttft_spans(self) -> dict[str, int]:
        """The same up to the first byte; empty before it."""
        return _named(self.ttft_slots) if self.ttft_slots is not None else {}


def _named(slots: list[int]) -> dict[str, int]:
    return {span.label: slots[span] for span in _ALL if slots[span] or span is Span.UNACCOUNTED}
