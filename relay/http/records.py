"""Ledgers of ended requests, kept for `GET /v1/requests/{id}/ledger`: the last so many, by our ID and by the client's."""

from collections import OrderedDict
from collections.abc import Iterable

import msgspec
import trio

from relay.clock import now_ns
from relay.http.exchange import Exchange
from relay.messages import Decision

_OVER_WITHIN_S = 1.0


class CandidateRecord(msgspec.Struct, frozen=True, kw_only=True):
    """See `relay.messages.Candidate`."""

    worker: str
    cached_tokens: int
    load: float
    score: float


class PlacementRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Why one attempt went where it went: candidates best first; without a prefill worker the decode worker computed the prompt."""

    rule: str
    prefill: list[CandidateRecord]
    decode: list[CandidateRecord]


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """What the route answers. spans: nanoseconds by name, they sum to wall_ns; ttft: the same up to the first byte, with
    the first token's `hop` and `out.*`, beside which the next steps ran: of the whole they are the last token's.

    exact: false where cuBLAS or torch's attention computed, whose bits depend on the batch (`engine.exact`): after a recovery tokens may be
    others than they would have been.
    """

    request_id: str
    client_request_id: str | None
    key: str | None
    route: str
    status: int
    error: str | None
    finish_reasons: list[str]
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    attempts: int
    exact: bool
    wall_ns: int
    spans: dict[str, int]
    ttft_ns: int | None
    ttft_spans: dict[str, int]
    violations: int
    decisions: list[PlacementRecord]


def record(exchange: Exchange) -> Record:
    """Of an exchange that has ended."""
    ledger = exchange.ledger
    return Record(
        request_id=exchange.request_id,
        client_request_id=exchange.public_id if exchange.public_id != exchange.request_id else None,
        key=exchange.caller.name,
        route=exchange.route,
        status=exchange.status,
        error=exchange.error.code if exchange.error else None,
        finish_reasons=exchange.finish_reasons,
        prompt_tokens=exchange.n_prompt,
        cached_tokens=exchange.n_cached,
        completion_tokens=exchange.n_generated,
        attempts=exchange.attempts,
        exact=exchange.exact,
        wall_ns=ledger.wall_ns,
        spans=ledger.spans(),
        ttft_ns=ledger.first_byte_ns - ledger.start_ns if ledger.ttft_slots is not None else None,
        ttft_spans=ledger.ttft_spans(),
        violations=ledger.violations,
        decisions=[_placement(decision) for decision in exchange.decisions],
    )


def _placement(decision: Decision) -> PlacementRecord:
    prefill, decode = (
        [CandidateRecord(worker=str(c.address), cached_tokens=c.n_cached, load=c.load, score=c.score) for c in candidates]
        for candidates in (decision.prefill, decision.decode)
    )
    return PlacementRecord(rule=decision.rule, prefill=prefill, decode=decode)


class Question(msgspec.Struct, frozen=True, array_like=True):
    """One gateway to all: the newest request with this ID, ours or a client's. `sees_only`: of that key's, None for anybody's."""

    name: str
    sees_only: str | None


class Kept(msgspec.Struct, frozen=True, array_like=True):
    """The answer: when it ended, on the monotonic clock, and the record as JSON."""

    ended_ns: int
    body: bytes


class Records:
    """At most `limit`; the oldest goes first. A client's ID names the latest request that used it, among those that the asker may see.

    A client that has read its last byte may ask at once, before the request has ended here: `until_over` waits for that.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._records: OrderedDict[str, tuple[int, Record]] = OrderedDict()
        self._by_client: dict[tuple[str, str | None], str] = {}
        self._open: dict[str, Exchange] = {}

    def opened(self, exchange: Exchange) -> None:
        """It will be kept when it ends, or `dropped`."""
        self._open[exchange.request_id] = exchange

    def dropped(self, exchange: Exchange) -> None:
        self._open.pop(exchange.request_id, None)

    async def until_over(self, question: Question) -> None:
        """Wait for the requests of this name whose last byte is on its way."""
        ending = [each for each in self._open.values() if each.ending and question.name in (each.request_id, each.public_id)]
        with trio.move_on_after(_OVER_WITHIN_S):
            for exchange in ending:
                await exchange.over.wait()

    def keep(self, kept: Record) -> None:
        self._records[kept.request_id] = now_ns(), kept
        for name in _client_names(kept):
            self._by_client[name] = kept.request_id
        while len(self._records) > self.limit:
            _, (_, old) = self._records.popitem(last=False)
            for name in _client_names(old):
                if self._by_client.get(name) == old.request_id:
                    del self._by_client[name]

    def ours(self, question: Question) -> bytes | None:
        """As JSON, if the name is an ID that this gateway gave."""
        found = self._seen(question.name, question)
        return None if found is None else found.body

    def find(self, question: Question) -> Kept | None:
        """By either ID."""
        by_client = self._by_client.get((question.name, question.sees_only))
        found = None if by_client is None else self._seen(by_client, question)
        return found or self._seen(question.name, question)

    def _seen(self, request_id: str, question: Question) -> Kept | None:
        ended_ns, kept = self._records.get(request_id, (0, None))
        if kept is None or question.sees_only not in (None, kept.key):
            return None
        return Kept(ended_ns, msgspec.json.encode(kept))

    async def answer(self, body: bytes) -> bytes | None:
        """To another gateway's question, as both travel."""
        question = msgspec.msgpack.decode(body, type=Question)
        await self.until_over(question)
        found = self.find(question)
        return None if found is None else msgspec.msgpack.encode(found)


def newest(answers: Iterable[bytes]) -> bytes | None:
    """Of all gateways' answers, the record that ended last, as JSON."""
    found = [msgspec.msgpack.decode(answer, type=Kept) for answer in answers]
    return max(found, key=lambda kept: kept.ended_ns).body if found else None


def _client_names(kept: Record) -> list[tuple[str, str | None]]:
    """Under which a client's ID is looked for: by its own key, and by who sees everything."""
    client_id = kept.client_request_id
    return [] if client_id is None else list(dict.fromkeys([(client_id, kept.key), (client_id, None)]))
