"""Limits that a request should meet: `ttft=500ms,tpot=50ms,e2e=10s`."""

import re

import msgspec

from relay.bench.record import Record

_TERM = re.compile(r"(ttft|tpot|e2e)=(\d+(?:\.\d+)?)(ms|s)")


class Slo(msgspec.Struct, frozen=True, kw_only=True):
    """In seconds; None is no limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    def met_by(self, record: Record) -> bool:
        """A failed request meets nothing; an answer of one token has no TPOT to be slow with."""
        if not record.ok:
            return False
        if self.ttft_s is not None and (record.ttft_s is None or record.ttft_s > self.ttft_s):
            return False
        if self.tpot_s is not None and record.tpot_s is not None and record.tpot_s > self.tpot_s:
            return False
        return self.e2e_s is None or record.e2e_s <= self.e2e_s


def parse_slo(text: str) -> Slo:
    """Raises ValueError."""
    limits: dict[str, float] = {}
    for term in text.split(","):
        match = _TERM.fullmatch(term.strip())
        if match is None or f"{match[1]}_s" in limits:
            raise ValueError(f"`{term}` is no limit, or is there twice; expected something like ttft=500ms,tpot=50ms,e2e=10s")
        limits[f"{match[1]}_s"] = float(match[2]) * (1e-3 if match[3] == "ms" else 1.0)
    return Slo(**limits)
