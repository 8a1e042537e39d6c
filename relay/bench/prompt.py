"""Prompts: segments of a plan in, token ids or a text of about as many tokens out.

Each key has an endless run of numbers of its own, computed by place (splitmix64 of seed, key and place), so that a shorter prompt is a
beginning of a longer one and nothing is kept. A number is a token id, or a word where only text is taken.
"""

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from relay.bench.dialect import Calibration
from relay.bench.schedule import Segment

_WORDS = tuple(
    word
    for line in (
        "time year people way day man thing woman life child world school state family student group country problem hand part place case",
        "company system program question work government number night point home water room mother area money story fact month lot",
        "right study book eye job word business issue side kind head house service friend father power hour game line end member law car",
        "city community name president team minute idea kid body information back parent face others level office door health person art",
        "war history party result change morning reason subject girl guy moment air teacher force education foot boy age policy music",
        "market sense nation plan college interest death experience effect use class control field development role effort rate heart drug",
        "show leader light voice wife police mind price report decision son view relationship town road arm difference value building",
        "action season society tax director position player record paper space ground form event official matter center couple",
    )
    for word in line.split()
)


class PromptMaker:
    """Token ids from `low` up to (not with) `high`, or words where there is a calibration."""

    def __init__(self, *, seed: int, low: int, high: int, calibration: Calibration | None) -> None:
        self._seed, self._low, self._high = seed, low, high
        self._calibration = calibration

    def make(self, segments: Sequence[Segment]) -> list[int] | str:
        if self._calibration is None:
            parts = [self._run(segment.key, segment.tokens) for segment in segments]
            return (self._low + np.concatenate(parts) % np.uint64(self._high - self._low)).tolist()  # type: ignore[no-any-return]
        total = max(1, sum(segment.tokens for segment in segments) - self._calibration.added_tokens)
        words: list[str] = []
        tokens = 0
        for segment in segments:
            tokens = min(total, tokens + segment.tokens)
            n = max(1, round(tokens / self._calibration.tokens_per_word)) - len(words)
            words += self.words(segment.key, n)
        return " ".join(words)

    def words(self, key: str, n: int) -> list[str]:
        """The first `n` of a key's run."""
        return [_WORDS[i] for i in self._run(key, n) % np.uint64(len(_WORDS))]

    def _run(self, key: str, n: int) -> npt.NDArray[np.uint64]:
        start = int.from_bytes(blake2b(f"{self._seed}/{key}".encode(), digest_size=8).digest(), "little")
        x = np.arange(n, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(start)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))
