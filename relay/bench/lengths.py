"""How many tokens prompts and answers have: `128`, `64:256` (uniform, both ends in), `lognormal:128:0.8` (median, sigma; `:1024` a cap)."""

import math
import random
import re

import msgspec

_FORMS = "expected a number such as 128, a range such as 64:256, or lognormal:MEDIAN:SIGMA[:MOST]"


class Lengths(msgspec.Struct, frozen=True, kw_only=True):
    """Uniform from `low` to `high`, or lognormal where there is a `sigma`, with `low` as its median and `high` as its cap (0: none)."""

    low: int
    high: int
    sigma: float | None = None

    def draw(self, source: random.Random) -> int:
        """At least 1."""
        if self.sigma is None:
            return self.low if self.low == self.high else source.randint(self.low, self.high)
        length = max(1, round(source.lognormvariate(math.log(self.low), self.sigma)))
        return min(length, self.high) if self.high else length

    def __str__(self) -> str:
        if self.sigma is not None:
            return f"lognormal:{self.low}:{self.sigma:g}" + (f":{self.high}" if self.high else "")
        return str(self.low) if self.low == self.high else f"{self.low}:{self.high}"


def parse_lengths(text: str) -> Lengths:
    """Raises ValueError."""
    if match := re.fullmatch(r"(\d+)(?::(\d+))?", text):
        low, high = int(match[1]), int(match[2] or match[1])
        if 1 <= low <= high:
            return Lengths(low=low, high=high)
    elif (match := re.fullmatch(r"lognormal:(\d+):(\d+(?:\.\d+)?)(?::(\d+))?", text)) and int(match[1]) >= 1:
        return Lengths(low=int(match[1]), high=int(match[3] or 0), sigma=float(match[2]))
    raise ValueError(f"`{text}` is no length; {_FORMS}, all of at least 1")
