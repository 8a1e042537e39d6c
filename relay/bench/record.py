"""One request and what was measured of it: the row of `--save-requests`. Times are seconds since the measurement began."""

from array import array
from itertools import pairwise

import msgspec


class Record(msgspec.Struct, kw_only=True):
    """`failure` is a kind (see `relay.bench`), None for ok. Token counts of `usage` are None where the server did not tell them;
    `request_id` is what the server calls the request (`X-Request-ID`), where it does."""

    index: int
    start_s: float
    sent_s: float
    end_s: float
    asked_prompt_tokens: int
    asked_output_tokens: int
    chunk_s: "array[float]"
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = None
    failure: str | None = None
    message: str = ""
    request_id: str | None = None

    @property
    def ok(self) -> bool:
        return self.failure is None

    @property
    def tokens(self) -> int:
        """Of the answer: by usage, else by chunks."""
        return len(self.chunk_s) if self.completion_tokens is None else self.completion_tokens

    @property
    def ttft_s(self) -> float | None:
        return self.chunk_s[0] - self.start_s if self.chunk_s else None

    @property
    def tpot_s(self) -> float | None:
        if not self.chunk_s or self.tokens < 2:
            return None
        return (self.chunk_s[-1] - self.chunk_s[0]) / (self.tokens - 1)

    @property
    def e2e_s(self) -> float:
        return self.end_s - self.start_s

    def itl_s(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.chunk_s)]

    def to_json(self) -> bytes:
        """One line; latencies in milliseconds, and when each chunk came, after `start_s`."""
        ttft, tpot = self.ttft_s, self.tpot_s
        return msgspec.json.encode(
            {
                "index": self.index,
                "request_id": self.request_id,
                "ok": self.ok,
                "failure": self.failure,
                "message": self.message,
                "start_s": round(self.start_s, 6),
                "send_lag_ms": _ms(self.sent_s - self.start_s),
                "ttft_ms": None if ttft is None else _ms(ttft),
                "tpot_ms": None if tpot is None else _ms(tpot),
                "e2e_ms": _ms(self.e2e_s),
                "asked_prompt_tokens": self.asked_prompt_tokens,
                "asked_output_tokens": self.asked_output_tokens,
                "prompt_tokens": self.prompt_tokens,
                "completion_tokens": self.completion_tokens,
                "cached_tokens": self.cached_tokens,
                "finish_reason": self.finish_reason,
                "chunk_ms": [_ms(at - self.start_s) for at in self.chunk_s],
            }
        )


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
