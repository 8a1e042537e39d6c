"""Prefill: computes prompts and pushes their KV, layer by layer, into leased blocks of decode workers.

Owns the jobs of its engine's prefill side; the blocks they compute in stay behind as its prefix cache. Receives Prefill and Revoke from
decode workers; sends the first token to the gateway, Prefilled or Returned to the decode worker: one of the two ends the lease, and nothing
is written after it. Log probabilities of a long prompt go ahead of both, in parts. Where the decode actor lives in the same worker, the
leased blocks are computed in place and no byte moves. Ends with its worker.
"""

from dataclasses import dataclass
from typing import assert_never

import trio

from relay.clock import now_ns
from relay.engine.engine import Add, Drop
from relay.engine.host import EngineHost
from relay.engine.report import NO_NUMBER, Advance, StepReport
from relay.engine.sequence import Sequence, SequenceId, Target
from relay.kv.book import BlockBook
from relay.kv.pool import KVPool
from relay.kv.pools import Pools
from relay.kv.prefix import namespace
from relay.ledger.spans import Span
from relay.messages import (
    Address,
    Announced,
    Down,
    Left,
    Oversized,
    Prefill,
    Prefilled,
    PrefillInbox,
    Returned,
    Revoke,
    Row,
    Scores,
    Tokens,
    Up,
    Withdrawn,
)
from relay.policy.cache_index import hints, news
from relay.runtime.node import Context
from relay.runtime.row_parts import PART_BYTES, parts, row_bytes, score_parts

JobKey = tuple[Address, str, int]


@dataclass(slots=True)
class Job:
    """One lease, and the sequence that fills it. `revoked` once the decode worker wants it back."""

    message: Prefill
    sequence: Sequence
    revoked: bool = False


class PrefillActor:
    _context: Context

    def __init__(
        self, host: EngineHost, book: BlockBook, memory: KVPool, pools: Pools, worker: str, model: str, reserve: bool = False
    ) -> None:
        self._host, self._book, self._memory, self._pools = host, book, memory, pools
        self._worker, self._model, self._reserve = worker, model, reserve
        self._jobs: dict[JobKey, Job] = {}
        self._computing: dict[SequenceId, JobKey] = {}
        self._router: Address | None = None
        self._draining = False
        self._empty = trio.Event()
        host.subscribe(self._on_report)

    async def run(self, context: Context) -> None:
        """Serve until the worker ends."""
        self._context = context
        async for message in context.inbox:
            self._on(message)  # type: ignore[arg-type]

    async def drain(self) -> None:
        """Have nothing more placed here; what is here or on its way is computed. Return when nothing is left."""
        self._draining = True
        if self._router is not None:
            self._context.post(self._router, Withdrawn(address=self._context.address))
        while self._jobs:
            await self._empty.wait()

    def _on(self, message: PrefillInbox) -> None:
        match message:
            case Up():
                if message.address.actor.startswith("router/"):
                    self._announce(message.address)
            case Prefill():
                self._on_prefill(message)
            case Revoke():
                self._on_revoke(message)
            case Oversized():
                self._on_oversized(message)
            case Down():
                self._on_down(message.address)
            case _:
                assert_never(message)

    def _announce(self, router: Address) -> None:
        self._router = router
        if self._draining:
            return
        layout = self._memory.layout
        self._context.post(
            router,
            Announced(
                address=self._context.address,
                role="prefill",
                worker=self._worker,
                n_blocks=layout.n_blocks,
                block_tokens=layout.block_tokens,
                max_running=self._host.max_running,
                reserve=self._reserve,
                prefills=not self._reserve,
                cached=hints(self._book.published_keys()),
            ),
        )

    def _on_prefill(self, message: Prefill) -> None:
        memory = self._pools.open(message.decode, message.pool)
        if memory is None:  # dead already: nobody waits for an answer, and the place here is free
            self._leave(message)
            return
        self._context.monitor(message.decode)
        here = memory is self._memory
        sequence = Sequence(
            id=self._host.next_id(),
            side="prefill",
            request_id=message.request_id,
            attempt=message.attempt,
            tokens=list(message.tokens),
            n_prompt=message.n_prompt,
            sampling=message.sampling,
            stopping=message.stopping,
            blocks=list(message.blocks) if here else [],
            root=namespace(self._model, message.salt),
            priority=message.priority,
            lone=message.lone,
            n_computed=message.n_present if here else 0,
            prompt_logprobs=message.prompt_logprobs,
            target=None if here else Target(memory, message.blocks, message.n_present),
            borrowed=here,
            trail=[*message.trail, (Span.HOP, now_ns())],
        )
        key = message.decode, message.request_id, message.attempt
        self._jobs[key] = Job(message, sequence)
        self._computing[sequence.id] = key
        self._host.submit(Add(sequence))

    def _on_revoke(self, message: Revoke) -> None:
        """The lease ends when the engine has let go; one that is not held any more is returned at once."""
        job = self._jobs.get((message.decode, message.request_id, message.attempt))
        if job is None:
            self._context.post(message.decode, Returned(request_id=message.request_id, attempt=message.attempt))
        elif not job.revoked:
            job.revoked = True
            self._host.submit(Drop(job.sequence.id))

    def _on_down(self, address: Address) -> None:
        """A decode worker is dead: its pool is a ghost that only we still map. A new memfd serves its next epoch."""
        self._pools.close(address)
        for key, job in self._jobs.items():
            if key[0] == address and not job.revoked:
                job.revoked = True
                self._host.submit(Drop(job.sequence.id))

    def _on_report(self, report: StepReport) -> None:
        """What is new of the cache goes first: the router counts what a prompt leaves there as coming, until it hears that it has left."""
        changes = news(self._worker, self._context.address.epoch, self._book)
        if changes is not None and self._router is not None:
            self._context.post(self._router, changes)
        for advance in report.advances:
            if advance.sequence.side == "prefill":
                self._on_first_token(advance)
        for sequence in report.gone:
            if sequence.side == "prefill":
                self._end(sequence)
        for sequence in report.failed:
            if sequence.side == "prefill":
                self._on_failed(sequence)

    def _on_first_token(self, advance: Advance) -> None:
        sequence = advance.sequence
        job = self._end(sequence)
        if job is None or job.revoked:
            return
        row = Row(
            request_id=sequence.request_id,
            attempt=sequence.attempt,
            first=advance.index,
            ids=(advance.token,),
            trail=advance.trail,
            finish=advance.finish or "",
            logprobs=(advance.logprobs,) if advance.logprobs is not None else (),
            n_cached=min(sequence.n_cached, sequence.n_prompt),
            prompt_logprobs=tuple(sequence.scores),
        )
        for part in parts(row):
            self._context.post(job.message.gateway, Tokens(source=self._context.address, rows=(part,), exact=self._host.exact))
        decode = job.message.decode
        if row_bytes(row) > PART_BYTES:
            for some in score_parts(row.prompt_logprobs):
                self._context.post(decode, Scores(request_id=row.request_id, attempt=row.attempt, logprobs=some))
            row = parts(row)[-1]
        self._context.post(
            decode,
            Prefilled(request_id=sequence.request_id, attempt=sequence.attempt, first=row, checksums=sequence.pushed_checksums()),
        )

    def _on_oversized(self, message: Oversized) -> None:
        """What the gateway was not told by us it is told by the decode worker; but that must not wait for the end of its lease."""
        if message.to.actor.startswith("decode/"):
            self._context.post(message.to, Returned(request_id=message.request_id, attempt=message.attempt, reason=message.reason))

    def _on_failed(self, sequence: Sequence) -> None:
        job = self._end(sequence)
        if job is not None and not job.revoked:
            decode = job.message.decode
            self._context.post(decode, Returned(request_id=sequence.request_id, attempt=sequence.attempt, reason=NO_NUMBER))

    def _end(self, sequence: Sequence) -> Job | None:
        """The engine has let go of it: free what it computed in, and give back a revoked lease."""
        key = self._computing.pop(sequence.id, None)
        if key is None:
            return None
        job = self._jobs.pop(key)
        if not sequence.borrowed:
            self._book.free(sequence.blocks)
            self._host.nudge()
        if job.revoked:
            self._context.post(key[0], Returned(request_id=sequence.request_id, attempt=sequence.attempt))
        self._leave(job.message)
        if not self._jobs:
            self._empty.set()
            self._empty = trio.Event()
        return job

    def _leave(self, message: Prefill) -> None:
        if self._router is not None:
            self._context.post(self._router, Left(request_id=message.request_id, attempt=message.attempt, address=self._context.address))
