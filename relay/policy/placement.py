"""Which workers an attempt goes to, and whether it may go now. Pure: the router feeds it facts and asks.

Admission counts the KV blocks a request will need: its tokens, and of what it may still generate the part that answers usually take (the
running 90th percentile times `kv_overcommit`); preemption covers the misjudged. What can never fit any pool is refused at once.
"""

from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field

from relay.kv.prefix import HINT_BYTES, BlockKey
from relay.messages import Address, Candidate, Key

_BUSY_FACTOR = 2


@dataclass(slots=True)
class WorkerLoad:
    """What the router believes of one prefill or decode actor.

    placed: blocks reserved (decode) or tokens to compute (prefill), by attempt; load: their sum. withheld: blocks that it declined to give
    although we thought them free. reserve: it takes this role in need only. prefills: its worker computes prompts, and not in need only.
    coming: how many of the placed will leave a block of this hint in its cache, so that who comes next need not compute it again.
    """

    address: Address
    worker: str
    n_blocks: int
    block_tokens: int
    max_running: int
    reserve: bool = False
    prefills: bool = False
    placed: dict[Key, int] = field(default_factory=dict)
    load: int = 0
    withheld: int = 0
    coming: dict[bytes, int] = field(default_factory=dict)
    _hints: dict[Key, list[bytes]] = field(default_factory=dict)
    _n_found: dict[Key, int] = field(default_factory=dict)  # of its hints, from the first on, somebody else leaves or has left

    @property
    def n_tokens(self) -> int:
        """That its pool holds."""
        return self.n_blocks * self.block_tokens

    def place(self, key: Key, amount: int, blocks: Sequence[BlockKey] = (), n_found: int = 0) -> None:
        """`blocks`: what will be in the cache behind it, of which `n_found` are, or come, without it."""
        self.placed[key] = amount
        self.load += amount
        hints = self._hints[key] = [block[:HINT_BYTES] for block in blocks]
        self._n_found[key] = n_found
        for hint in hints:
            self.coming[hint] = self.coming.get(hint, 0) + 1

    def computed(self, key: Key) -> None:
        """It is no load any more, but what it leaves in the cache has yet to come."""
        self.load -= self.placed.get(key, 0)
        if key in self.placed:
            self.placed[key] = 0

    def leave(self, key: Key, cached: Container[bytes] = ()) -> None:
        """`cached`: hints of what is there. What it should have left and has not, another that counts on it has to compute."""
        self.load -= self.placed.pop(key, 0)
        hints, n_found = self._hints.pop(key, []), self._n_found.pop(key, 0)
        for hint in hints:
            self.coming[hint] -= 1
            if not self.coming[hint]:
                del self.coming[hint]
        missing = [i for i in range(n_found, len(hints)) if hints[i] in self.coming and hints[i] not in cached]
        heir = next((other for other, theirs in self._hints.items() if hints[missing[0]] in theirs), None) if missing else None
        if heir is not None and self._n_found[heir] > missing[0]:
            amount = sum(i < self._n_found[heir] for i in missing) * self.block_tokens
            self._n_found[heir] = missing[0]
            self.placed[heir] += amount
            self.load += amount


def rank(worker: WorkerLoad) -> tuple[bool, str]:
    """The same for all actors of a worker, and for all its lives."""
    return worker.prefills, worker.worker


def may_compute_for(prefill: WorkerLoad, decode: WorkerLoad) -> bool:
    """Whether a prompt of this decode actor may go to that prefill actor.

    A lease waits until its prefill worker has room, and where one pool serves both roles that room may be leased, and wait in its turn.
    So between two workers leases wait one way only: the higher in rank computes for the lower.
    """
    return prefill.worker == decode.worker or rank(prefill) > rank(decode)


def serving(workers: Iterable[WorkerLoad]) -> list[WorkerLoad]:
    """Those whose role it is; if none of them lives, the reserve: a request never waits for a process to start."""
    every = list(workers)
    return [worker for worker in every if not worker.reserve] or every


class AnswerLengths:
    """The running 90th percentile of how many tokens answers have, from the last 256 of them."""

    def __init__(self, assumed: int) -> None:
        self._assumed = assumed
        self._seen: deque[int] = deque(maxlen=256)

    def saw(self, n_tokens: int) -> None:
        self._seen.append(n_tokens)

    def p90(self) -> int:
        """`assumed` until 16 answers have been seen."""
        if len(self._seen) < 16:
            return self._assumed
        return sorted(self._seen)[int(0.9 * len(self._seen))]


def blocks_wanted(n_tokens: int, max_more: int, expected_more: int, overcommit: float, block_tokens: int) -> int:
    """Blocks to reserve for `n_tokens` now and at most `max_more` later."""
    return -(-(n_tokens + min(max_more, max(1, int(expected_more * overcommit)))) // block_tokens)


def holding_all_of(workers: Iterable[WorkerLoad], n_tokens: int) -> list[WorkerLoad]:
    """Those whose pools have room for so many, with nothing else in them: in any other it would wait for ever, once it has grown."""
    return [worker for worker in workers if n_tokens <= worker.n_tokens]


def weigh_prefill(workers: Iterable[WorkerLoad], n_tokens: int, n_cached: Callable[[WorkerLoad], int]) -> list[Candidate]:
    """Least first: what it still has to compute before this one, and of this one what it has not cached; twice that, unless it is idle.

    Load and cache are in one unit, so a hot prefix draws requests only as long as waiting there costs less than computing it elsewhere.
    Twice, since it is not this one alone that waits while a prefix is computed a second time: so does everyone behind it.
    """
    found = []
    for w in workers:
        cached = n_cached(w)
        to_compute = n_tokens - min(cached, n_tokens)
        found.append(Candidate(w.address, cached, w.load, w.load + (_BUSY_FACTOR if w.load else 1) * to_compute))
    return sorted(found, key=lambda c: (c.score, c.address))


def weigh_decode(workers: Iterable[WorkerLoad], n_blocks: int, n_cached: Callable[[WorkerLoad], int]) -> list[Candidate]:
    """Least first: the share of blocks in use once this one is there; only those that have room and a place in their batch."""
    found = []
    for w in workers:
        cached = n_cached(w)
        if w.load + w.withheld + n_blocks <= w.n_blocks and len(w.placed) < w.max_running:
            score = (w.load + n_blocks - cached // w.block_tokens) / w.n_blocks
            found.append(Candidate(w.address, cached, w.load / w.n_blocks, score))
    return sorted(found, key=lambda c: (c.score, c.address))
