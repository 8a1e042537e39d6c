"""When a dead worker starts again, and when the server gives up. Pure."""

from collections import deque

from relay.errors import TooManyRestarts


class RestartPolicy:
    """At most `max_restarts` deaths in `within_s`. The wait doubles from `first_s` to `most_s`; a quiet `within_s` forgets it."""

    def __init__(self, worker: str, *, max_restarts: int, within_s: float, first_s: float, most_s: float) -> None:
        self._worker, self._max, self._within_s, self._first_s, self._most_s = worker, max_restarts, within_s, first_s, most_s
        self._deaths: deque[float] = deque()

    def died(self, now: float, reason: str) -> float:
        """Seconds to wait before the next start. Raises TooManyRestarts, which ends the server."""
        self._deaths.append(now)
        while now - self._deaths[0] > self._within_s:
            self._deaths.popleft()
        n = len(self._deaths)
        if n > self._max:
            raise TooManyRestarts(
                f"worker {self._worker} died {n} times in {self._within_s:g} s, the last time of: {reason} "
                f"(the limit is runtime.max_restarts: {self._max})"
            )
        return float(min(self._first_s * 2.0 ** min(n - 1, 60), self._most_s))
