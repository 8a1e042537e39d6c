"""Prefill: computes prompts and pushes their KV, layer by layer, into leased blocks of decode workers.

Owns the jobs of its engine's prefill side and the blocks they compute in. Receives Prefill and Revoke from decode workers; sends the first
token to the gateway, Prefilled or Returned to the decode worker: one of the two ends the lease, and nothing is written after it. Where the
decode actor lives in the same worker, the leased blocks are computed in place and no byte moves. Ends with its worker.
"""

from dataclasses import dataclass
from typing import assert_never

from relay.clock import now_ns
from relay.engine.engine import Add, Drop
from relay.engine.host import EngineHost
from relay.engine.report import Advance, StepReport
from relay.engine.sequence import Sequence, SequenceId, Target
from relay.kv.book import BlockBook
from relay.kv.memory import KVMemory
from relay.kv.pools import Pools
from relay.ledger.spans import Span
from relay.messages import Address, Announced, Down, Left, Prefill, Prefilled, PrefillInbox, Returned, Revoke, Row, Tokens, Up
from relay.runtime.node import Context

JobKey = tuple[Address, str, int]


@dataclass(slots=True)
class Job:
    """One lease. `sequence` once it has blocks to compute in; `revoked` once the decode worker wants it back."""

    message: Prefill
    memory: KVMemory
    received: tuple[int, int]
    sequence: Sequence | None = None
    revoked: bool = False


class PrefillActor:
    _context: Context

    def __init__(self, host: EngineHost, book: BlockBook, memory: KVMemory, pools: Pools, worker: str) -> None:
        self._host, self._book, self._memory, self._pools, self._worker = host, book, memory, pools, worker
        self._jobs: dict[JobKey, Job] = {}
        self._computing: dict[SequenceId, JobKey] = {}
        self._router: Address | None = None
        host.subscribe(self._on_report)

    async def run(self, context: Context) -> None:
        """Serve until the worker ends."""
        self._context = context
        async for message in context.inbox:
            self._on(message)  # type: ignore[arg-type]

    def _on(self, message: PrefillInbox) -> None:
        match message:
            case Up():
                if message.address.actor.startswith("router/"):
                    self._announce(message.address)
            case Prefill():
                self._on_prefill(message)
            case Revoke():
                self._on_revoke(message)
            case Down():
                self._on_down(message.address)
            case _:
                assert_never(message)

    def _announce(self, router: Address) -> None:
        self._router = router
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
            ),
        )

    def _on_prefill(self, message: Prefill) -> None:
        memory = self._pools.open(message.decode)
        if memory is None:
            return  # dead already: nobody waits for an answer
        self._context.monitor(message.decode)
        key = message.decode, message.request_id, message.attempt
        self._jobs[key] = Job(message, memory, (Span.HOP, now_ns()))
        self._start_jobs()

    def _start_jobs(self) -> None:
        """First come, first served: give blocks to jobs that have none, until one does not fit."""
        for key, job in self._jobs.items():
            if job.sequence is None and not self._start(key, job):
                break

    def _start(self, key: JobKey, job: Job) -> bool:
        message, here = job.message, job.memory is self._memory
        blocks = list(message.blocks) if here else self._book.allocate(self._memory.layout.blocks_for(len(message.tokens)))
        if blocks is None:
            return False
        job.sequence = Sequence(
            id=self._host.next_id(),
            side="prefill",
            request_id=message.request_id,
            attempt=message.attempt,
            tokens=list(message.tokens),
            n_prompt=message.n_prompt,
            sampling=message.sampling,
            stopping=message.stopping,
            blocks=blocks,
            prompt_logprobs=message.prompt_logprobs,
            target=None if here else Target(job.memory, message.blocks, message.n_present),
            trail=[*message.trail, job.received, (Span.PREFILL_QUEUE_BLOCKS, now_ns())],
        )
        self._computing[job.sequence.id] = key
        self._host.submit(Add(job.sequence))
        return True

    def _on_revoke(self, message: Revoke) -> None:
        """Between two steps nothing is written: the lease ends at once if nothing has begun, else when the engine has let go."""
        key = (message.decode, message.request_id, message.attempt)
        job = self._jobs.get(key)
        if job is None or job.sequence is None:
            if job is not None:
                self._leave(self._jobs.pop(key))
            self._context.post(message.decode, Returned(request_id=message.request_id, attempt=message.attempt))
            self._start_jobs()
        elif not job.revoked:
            job.revoked = True
            self._host.submit(Drop(job.sequence.id))

    def _on_down(self, address: Address) -> None:
        """A decode worker is dead: its pool is a ghost that only we still map. A new memfd serves its next epoch."""
        self._pools.close(address)
        for key, job in list(self._jobs.items()):
            if key[0] == address:
                if job.sequence is None:
                    self._leave(self._jobs.pop(key))
                elif not job.revoked:
                    job.revoked = True
                    self._host.submit(Drop(job.sequence.id))
        self._start_jobs()

    def _on_report(self, report: StepReport) -> None:
        for advance in report.advances:
            if advance.sequence.side == "prefill":
                self._on_first_token(advance)
        for sequence in report.gone:
            if sequence.side == "prefill":
                self._end(sequence)
        self._start_jobs()

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
            prompt_logprobs=tuple(sequence.scores),
        )
        self._context.post(job.message.gateway, Tokens(source=self._context.address, rows=(row,)))
        self._context.post(
            job.message.decode,
            Prefilled(request_id=sequence.request_id, attempt=sequence.attempt, first=row, checksums=sequence.pushed_checksums()),
        )

    def _end(self, sequence: Sequence) -> Job | None:
        """The engine has let go of it: free what it computed in, and give back a revoked lease."""
        key = self._computing.pop(sequence.id, None)
        if key is None:
            return None
        job = self._jobs.pop(key)
        if job.memory is not self._memory:
            self._book.free(sequence.blocks)
        if job.revoked:
            self._context.post(key[0], Returned(request_id=sequence.request_id, attempt=sequence.attempt))
        self._leave(job)
        return job

    def _leave(self, job: Job) -> None:
        if self._router is not None:
            self._context.post(
                self._router, Left(request_id=job.message.request_id, attempt=job.message.attempt, address=self._context.address)
            )
