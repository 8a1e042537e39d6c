"""Clients who only want their answers, while others attack: each compares what it got with the quiet server's."""

import random
import threading
import time
from collections.abc import Sequence
from math import comb

from relay.chaos.attack.strikes import Strikes
from relay.chaos.client import ChaosClient, Outcome
from relay.chaos.requests import Spec

_AGAIN_WITHIN_S = 90.0
_AGAIN_AFTER_S = 0.2
_LATE = 3.0  # times the quiet p99
_ONE_IN = 100  # may be later than that: it is the p99 which is bounded
_UNLIKELY = 0.001


class Honest:
    """`n` threads, every other of which opens resumable streams. right: answers of the quiet server, by request.

    An answer that breaks off, or ends in an error, is asked for again, which is forgiven where a deadly strike fell into it; 503 and 429
    are refusals, and counted. answers, refused, forgiven: counts. broke: what should not have been.
    """

    def __init__(self, url: str, specs: Sequence[Spec], right: Sequence[Outcome], strikes: Strikes, n: int) -> None:
        self._url, self._specs, self._right, self._strikes = url, specs, right, strikes
        self._over, self._lock = threading.Event(), threading.Lock()
        self._first_ms: list[tuple[float, float, float]] = []  # began, first token, milliseconds
        self.answers = self.refused = self.forgiven = self.resumed = 0
        self.broke: list[str] = []
        self._threads = [threading.Thread(target=self._load, args=(i,), name=f"honest-{i}", daemon=True) for i in range(n)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self, within_s: float) -> None:
        """After the request that each has under way."""
        self._over.set()
        give_up = time.monotonic() + within_s
        for thread in self._threads:
            thread.join(max(0.0, give_up - time.monotonic()))
        waiting = [thread.name for thread in self._threads if thread.is_alive()]
        if waiting:
            self._tell(f"{', '.join(waiting)} got no end of an answer within {within_s:.0f} s")

    def first_tokens_ms(self, from_s: float, to_s: float) -> list[float]:
        """Of the requests that began in this time and met no strike."""
        with self._lock:
            found = list(self._first_ms)
        return [ms for began, came, ms in found if from_s <= began < to_s and not self._strikes.hit(began, came, deadly=False)]

    def _load(self, number: int) -> None:
        draw, client = random.Random(f"honest {number}"), ChaosClient(self._url, resumable=number % 2 == 0)
        while not self._over.is_set():
            index = draw.randrange(len(self._specs))
            outcome = self._ask(client, index)
            if outcome is not None:
                self._compare(index, outcome)

    def _ask(self, client: ChaosClient, index: int) -> Outcome | None:
        """Until there is an answer; None if there is none that could be expected any more."""
        give_up = time.monotonic() + _AGAIN_WITHIN_S
        while True:
            outcome = client.ask(self._specs[index])
            if not outcome.failure:
                return outcome
            refused = outcome.failure.startswith(("HTTP 503", "HTTP 429"))
            struck = self._strikes.hit(outcome.started_s, time.monotonic(), deadly=True)
            with self._lock:
                self.refused += refused
                self.forgiven += struck and not refused
            if not refused and not struck:
                self._tell(f"`{outcome.kind}` failed though nothing was struck: {outcome.failure}")
                return None
            if time.monotonic() > give_up or self._over.is_set():
                self._tell(f"`{outcome.kind}` was asked for again and again: {outcome.failure}")
                return None
            time.sleep(_AGAIN_AFTER_S)

    def _compare(self, index: int, outcome: Outcome) -> None:
        with self._lock:
            self.answers += 1
            self.resumed += outcome.n_resumed > 0
            if outcome.event_s and not outcome.n_resumed and not outcome.n_asked_again:
                came = outcome.event_s[0]
                self._first_ms.append((outcome.started_s, came, 1e3 * (came - outcome.started_s)))
        if outcome.answer != self._right[index].answer:
            self._tell(f"`{outcome.kind}` has another answer, {outcome.answer!r:.300} instead of {self._right[index].answer!r:.300}")

    def _tell(self, what: str) -> None:
        with self._lock:
            self.broke.append(f"honest: {what}")


def percentile_99(sample: Sequence[float]) -> float:
    """By nearest rank: the largest of fewer than a hundred."""
    ordered = sorted(sample)
    return ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)] if ordered else 0.0


def is_later(quiet: Sequence[float], attacked: Sequence[float]) -> bool:
    """Whether the p99 of `attacked` is above three times that of `quiet`, beyond doubt.

    If it were not, one in a hundred would be later than that, and so many as there are with a chance of less than one in a thousand.
    """
    limit, n = _LATE * percentile_99(quiet), len(attacked)
    late = sum(ms > limit for ms in attacked)
    share = 1 / _ONE_IN
    fewer = sum(comb(n, k) * share**k * (1 - share) ** (n - k) for k in range(late))
    return bool(quiet) and late > 0 and 1 - fewer < _UNLIKELY
