"""When a dead worker starts again, and when it dies too often. Pure."""

from collections import deque

from relay.errors import TooManyRestarts


class RestartPolicy:
    """At most `max_restarts` deaths in `within_s`. The wait doubles from `first_s` to `most_s`, over the limit from there to `within_s`; a
    quiet `within_s` forgets it."""

    def __init__(self, worker: str, *, max_restarts: int, within_s: float, first_s: float, most_s: float) -> None:
        self._worker, self._max, self._within_s, self._first_s, self._most_s = worker, max_restarts, within_s, first_s, most_s
        self._deaths: deque[float] = deque()
        self._n_over = 0
        self._last_reason = ""

    def died(self, now: float, reason: str) -> float:
        """Seconds to wait before the next start."""
        self._last_reason = reason
        self._deaths.append(now)
        self._forget(now)
        n = len(self._deaths)
        if n > self._max:
            self._n_over += 1
            return float(min(self._most_s * 2.0 ** min(self._n_over - 1, 60), max(self._most_s, self._within_s)))
        self._n_over = 0
        return float(min(self._first_s * 2.0 ** min(n - 1, 60), self._most_s))

    def too_many(self, now: float) -> TooManyRestarts | None:
        """What to say of it, if it is over the limit."""
        self._forget(now)
        n = len(self._deaths)
        if n <= self._max:
            return None
        return TooManyRestarts(
            f"worker {self._worker} died {n} times in {self._within_s:g} s, the last time of: {self._last_reason} "
            f"(the limit is runtime.max_restarts: {self._max})"
        )

    def _forget(self, now: float) -> None:
        while self._deaths and now - self._deaths[0] > self._within_s:
            self._deaths.popleft()
