"""One request's ledger: a cursor that moves through its life and leaves each nanosecond in one slot.

`close(span, t)` gives everything since the cursor to `span`. There are no start stamps, so spans cannot overlap and nothing falls between
two; the spans sum to the wall time by construction. What happened elsewhere comes as a trail and enters by `fold`, which counts only what
lies after the cursor.

A token's journey, from its step's end to the client's socket, keeps nobody waiting while the next step is computed. So what `hop` and
`out.*` claim behind the end of a trail stands only until another trail says what was done in that time: then the cursor goes back, and the
trail takes it. In the end the last token's journey is left, and at the first byte, where the ledger is cut, the first one's.
"""

from relay.ledger.spans import N_SPANS, Span
from relay.messages import Trail

_ALL = tuple(Span)
_JOURNEY = (Span.HOP, Span.OUT_DETOKENIZE, Span.OUT_HANDOFF, Span.OUT_WRITE_BLOCKED)
_IS_JOURNEY = [span in _JOURNEY for span in _ALL]
_HOP, _DETOKENIZE, _HANDOFF, _BLOCKED = (int(span) for span in _JOURNEY)


class Ledger:
    """Owned by one task at a time; integers only, nothing allocated per token."""

    __slots__ = ("_journey", "_slots", "cursor_ns", "first_byte_ns", "settled_ns", "start_ns", "ttft_slots", "violations")

    def __init__(self, start_ns: int) -> None:
        self.start_ns = start_ns
        self.cursor_ns = self.settled_ns = start_ns
        self._slots = [0] * N_SPANS  # up to `settled_ns`: this stays
        self._journey = [0] * N_SPANS  # from there to the cursor: until a trail says better
        self.first_byte_ns = 0
        self.ttft_slots: list[int] | None = None
        self.violations = 0  # stamps before the cursor where none may be: counted, never clamped in silence

    def close(self, span: Span, t_ns: int) -> None:
        """What happened since the cursor was `span`; it ended at `t_ns`, now or earlier in this process."""
        if t_ns < self.cursor_ns:
            self.violations += 1
            return
        if _IS_JOURNEY[span]:
            self._journey[span] += t_ns - self.cursor_ns
            self.cursor_ns = t_ns
            return
        self._settle()
        self._slots[span] += t_ns - self.cursor_ns
        self.cursor_ns = self.settled_ns = t_ns

    def lose(self, t_ns: int) -> None:
        """The attempt has died: everything since its last step's end was for nothing."""
        self._take_back()
        self.close(Span.RETRY_WASTED, max(t_ns, self.cursor_ns))

    def fold(self, trail: Trail) -> None:
        """Take in what another actor says of the way here: what lies behind the trail before was waited for, not that one's token."""
        if not trail or trail[-1][1] <= self.settled_ns:
            return
        self._take_back()
        cursor, slots = self.cursor_ns, self._slots
        for span, end in trail:
            if end > cursor:
                slots[span] += end - cursor
                cursor = end
        self.cursor_ns = self.settled_ns = cursor

    def first_byte(self) -> None:
        """The first byte of the answer has gone: the same ledger, cut here, explains TTFT."""
        if self.ttft_slots is None:
            self.first_byte_ns = self.cursor_ns
            self.ttft_slots = self._sums()

    def __getitem__(self, span: Span) -> int:
        return self._slots[span] + self._journey[span]

    @property
    def wall_ns(self) -> int:
        return self.cursor_ns - self.start_ns

    def spans(self) -> dict[str, int]:
        """Every span that took time, and `unaccounted`, by name; they sum to `wall_ns`."""
        return _named(self._sums())

    def ttft_spans(self) -> dict[str, int]:
        """The same up to the first byte; empty before it. Its `hop` and `out.*` may exceed the whole's: the next steps ran beside them."""
        return _named(self.ttft_slots) if self.ttft_slots is not None else {}

    def _take_back(self) -> None:
        journey = self._journey
        journey[_HOP] = journey[_DETOKENIZE] = journey[_HANDOFF] = journey[_BLOCKED] = 0
        self.cursor_ns = self.settled_ns

    def _settle(self) -> None:
        """Nothing more will be said of it."""
        for span in _JOURNEY:
            self._slots[span] += self._journey[span]
            self._journey[span] = 0

    def _sums(self) -> list[int]:
        return [settled + journey for settled, journey in zip(self._slots, self._journey, strict=True)]


def _named(slots: list[int]) -> dict[str, int]:
    return {span.label: slots[span] for span in _ALL if slots[span] or span is Span.UNACCOUNTED}
