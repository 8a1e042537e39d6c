"""Ledgers of ended requests, kept for `GET /v1/requests/{id}/ledger`: the last so many, by our ID and by the client's."""

from collections import OrderedDict
from typing import Any

import msgspec

from relay.http.exchange import Exchange
from relay.messages import Decision


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
    """What the route answers. spans: nanoseconds by name, they sum to wall_ns; ttft: the same up to the first byte."""

    request_id: str
    client_request_id: str | None
    route: str
    status: int
    error: str | None
    finish_reasons: list[str]
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    attempts: int
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
        route=exchange.route,
        status=exchange.status,
        error=exchange.error.code if exchange.error else None,
        finish_reasons=exchange.finish_reasons,
        prompt_tokens=exchange.n_prompt,
        cached_tokens=exchange.n_cached,
        completion_tokens=exchange.n_generated,
        attempts=exchange.attempts,
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


class Records:
    """At most `limit`; the oldest goes first. A client's ID names the latest request that used it."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._records: OrderedDict[str, Record] = OrderedDict()
        self._by_client: dict[str, str] = {}

    def keep(self, kept: Record) -> None:
        self._records[kept.request_id] = kept
        if kept.client_request_id is not None:
            self._by_client[kept.client_request_id] = kept.request_id
        while len(self._records) > self.limit:
            _, old = self._records.popitem(last=False)
            if old.client_request_id is not None and self._by_client.get(old.client_request_id) == old.request_id:
                del self._by_client[old.client_request_id]

    def find(self, name: str) -> Record | None:
        """By either ID."""
        return self._records.get(self._by_client.get(name, name)) or self._records.get(name)


def encode(kept: Any) -> bytes:
    return msgspec.json.encode(kept)
