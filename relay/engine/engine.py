"""Continuous batching over one runner and one pool: what both prefill and decode workers are. Synchronous; lives on the compute thread.

In: jobs (Add a sequence to compute, Join one whose KV has arrived, Drop one). Out: one StepReport a step. `step(jobs)` takes the jobs,
makes room (growth, preemption), computes one batch of chunks and decode rows, draws, and says what happened. It waits for nothing but the
runner. Where that computes beside the host, the rows of the next step are made in the meantime, and the jobs that come are looked at
(`_look_ahead`): nothing is decided there, so that steps are the same without it. And where every sequence of a decode step goes on, and
nothing else is there to do, the next one is what it would be in any case: it is begun with the tokens of this one, before those are
reported (`_follow`). Jobs that come then are taken when it is over, as if they had come a moment later.

A step of prompts alone whose sequences are all dropped while it is computed is abandoned, where the runner can do that (`forgo`).

Sequences that wait, and how they come by blocks, are in `relay.engine.line`; what a decode step guesses, in `relay.engine.speculation`. Out
of blocks, the last decode sequence in order of priority and age is preempted: its blocks go back at once, and it waits in front of all
prompts to be computed again from its tokens.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from relay.clock import now_ns
from relay.engine import trails
from relay.engine.ahead import RowsAhead
from relay.engine.arrivals import Arrivals
from relay.engine.board import StepBoard
from relay.engine.drafter import Drafter
from relay.engine.line import Line
from relay.engine.report import Advance, StepReport
from relay.engine.rows import rows_of
from relay.engine.runner import Abandonable, Batch, Launches, Pending, Runner, StepResult, beside_host, launching
from relay.engine.sequence import Sequence, SequenceId
from relay.engine.speculation import Speculation, judge
from relay.engine.step import Part, Scored, Step, UnderWay, needed
from relay.kv.book import BlockBook
from relay.ledger.spans import Span
from relay.messages import FinishReason
from relay.policy.batching import StepClock, plan_chunks

_VERIFY_BYTES_PER_MS = 2 << 20  # what one core sums at least, of memory that it has not seen for a while
_MOST_PAUSES = 4  # steps of prompts alone before running sequences get their turn


@dataclass(frozen=True, slots=True)
class Add:
    """Compute this sequence from `n_computed` on. Its blocks hold all its tokens, or are empty: then the engine finds some."""

    sequence: Sequence


@dataclass(frozen=True, slots=True)
class Join:
    """Decode this sequence, whose blocks somebody else wrote. checksums: uint64 [n_layers, n], of its last n blocks before growth."""

    sequence: Sequence
    checksums: bytes
    n_checked: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Forget it, if it is here."""

    id: SequenceId


@dataclass(frozen=True, slots=True)
class Nudge:
    """Blocks were freed: look again at what waits for some."""


Job = Add | Join | Drop | Nudge


class Engine:
    """`floor_ns(n_rows, n_kv_tokens)` is the least time this machine can take for a step (`relay.engine.roofline`).

    drafter: makes one for each sequence that decodes; None: nothing is guessed. Guesses fill decode steps up to `draft_rows` rows, for each
    sequence at most `most_drafts`.
    """

    def __init__(
        self,
        runner: Runner,
        book: BlockBook,
        clock: StepClock,
        *,
        max_running: int,
        max_chunk_tokens: int,
        floor_ns: Callable[[int, int], int],
        first: Literal["mixed", "decode", "prefill"] = "mixed",
        board: StepBoard | None = None,
        drafter: Callable[[Sequence], Drafter] | None = None,
        draft_rows: int = 0,
        most_drafts: int = 7,
        verify_bytes_per_ms: int = _VERIFY_BYTES_PER_MS,
    ) -> None:
        self._runner, self._book, self._clock = runner, book, clock
        self._launch, self._beside = launching(runner), beside_host(runner)
        self._max_running, self._max_chunk_tokens, self._floor_ns = max_running, max_chunk_tokens, floor_ns
        self._first, self._n_pauses = first, 0
        self._was_alone = False  # the last step was a suspect's
        self._board = board
        self._block_tokens = runner.layout.block_tokens
        self._running: dict[SequenceId, Sequence] = {}
        self._line = Line(book, runner.memory)
        self._arrivals, self._verify_bytes_per_ms = Arrivals(runner.memory), verify_bytes_per_ms
        self._speculation = Speculation(drafter, draft_rows, most_drafts, book, self._block_tokens) if drafter is not None else None
        self._ahead: RowsAhead | None = None
        self._flight: tuple[Step, Pending] | None = None
        self._prompts: UnderWay | None = None
        self._joining = False  # the last step has computed a prompt that will come back to decode here
        self._held: list[Job] = []  # that came while a step was in flight
        self._untold: StepReport | None = None  # the last one, while `computes` has not been called since
        self.flies = False  # whether a step may be begun before the one before it is reported: then `settle` must be the last call
        self.arrived: Callable[[], list[Job]] = list  # jobs that the next step will be given, as far as they are known
        self.computes: Callable[[], None] = lambda: None  # called once in each turn with a batch: the report before may go out
        self.on_logits: Callable[[Sequence, int, np.ndarray], None] | None = None  # tests look at every row of logits

    @property
    def n_running(self) -> int:
        return len(self._running)

    @property
    def n_waiting(self) -> int:
        return len(self._line)

    def step(self, jobs: list[Job]) -> tuple[StepReport, bool]:
        """One turn; the bool says whether there is more that can be computed now."""
        jobs, self._held = self._held + jobs, []
        if self._flight is not None:
            (step, pending), self._held = self._flight, jobs
        else:
            verifies = self._arrivals or any(isinstance(job, Join) for job in jobs)
            if self._untold is not None and (self._untold.n_prefill_tokens or verifies):
                self._tell()  # first tokens wait for nothing, and what a Join brings may take long to verify
            step = self.begin(jobs)
            if step.batch is None:
                self._untold = None
                return step.report, False
            if self._beside is None or step.report.n_prefill_tokens:
                self._tell()
            pending = self._launch(step.batch)
            self._flight = step, pending
            self.launched(step, pending)
        if self._beside is not None:
            self._tell()
            self._look_ahead(step, self._beside)
        self._flight = None
        result = pending.result()
        if result.abandoned:
            self.abandon(step)
            self._untold = step.report
            return step.report, True
        step.computed_ns = now_ns()
        self._gain(step, result)
        self._flight = self._follow(step, result)
        self.end(step, result)
        self._untold = step.report
        return step.report, True

    def launched(self, step: Step, pending: Abandonable) -> None:
        """`step` is being computed: it is abandoned if it is of prompts alone, and all of them are dropped meanwhile."""
        if not step.report.n_decode_rows:
            self._prompts = UnderWay([part.sequence.id for part in step.parts], pending)
            for job in self.arrived():
                if isinstance(job, Drop):
                    self._prompts.forgo(job.id)

    def forgo(self, sequence_id: SequenceId) -> None:
        """From any thread, once its Drop has been submitted: it may be the last one for whom the present step is computed."""
        prompts = self._prompts
        if prompts is not None:
            prompts.forgo(sequence_id)

    def settle(self) -> None:
        """Wait for a step in flight, and forget it: nothing writes to the pool any more. Sequences are of no use afterwards."""
        flight, self._flight = self._flight, None
        if flight is not None:
            flight[1].abandon()
            flight[1].result()
            if self._board is not None:
                self._board.end()

    def _tell(self) -> None:
        """The last report goes out now, if it has not: its tokens' journey, which has begun at the end of their step, goes on."""
        if self._untold is not None:
            self._untold = None
            self.computes()

    def _follow(self, step: Step, result: StepResult) -> tuple[Step, Pending] | None:
        """Begin the next step at once, with what was made ahead, if all have got a token and nothing else has happened."""
        if not self.flies or self._beside is None or self._held or self._arrivals or self._line or self.arrived():
            return None
        if len(self._running) != len(step.parts):
            return None
        sequences = [part.sequence for part in step.parts]
        if any(each.id not in self._running or each.lone or len(each.tokens) > len(each.blocks) * self._block_tokens for each in sequences):
            return None
        assert step.gains is not None
        if any(gain[1] is not None for gain in step.gains if gain is not None) or min(result.ids) < 0:
            return None
        parts = self._with_drafts([Part(sequence, 1, True) for sequence in sequences])
        ahead, scored = self._ahead, step.scored
        if ahead is not None and ahead.is_of(sequences) and not any(part.drafts for part in (*step.parts, *parts)):
            self._ahead, batch = None, ahead.whole
            batch.tokens[:] = result.ids
        else:
            batch, scored = self._batch(parts)
        step.followed_ns = now = now_ns()
        report = StepReport(began_ns=now, n_decode_rows=len(parts), n_drafted=sum(len(part.drafts) for part in parts))
        return Step(report, parts, batch, scored, started_ns=now), self._launch(batch)

    def _look_ahead(self, step: Step, beside: Launches) -> None:
        """While `step` is computed: what the next one needs in any case. It changes nothing but what is remembered, and gives a
        sequence its next block early where there are enough for all."""
        drawn = (part for part in step.parts if part.draws and part.sequence.side == "decode")
        goes_on = [part for part in drawn if part.sequence.n_generated + 1 < part.sequence.stopping.max_tokens]
        for part in goes_on:
            self._grow_early(part, len(step.parts))
        going_on = [part.sequence for part in goes_on if not part.drafts]
        if going_on:
            self._ahead = RowsAhead(going_on)
        if self.flies and len(going_on) == len(step.parts) == len(self._running) and not (self._held or self._line or self._arrivals):
            assert self._ahead is not None
            beside.prepare(self._ahead.whole)
        for job in self._held + self.arrived():
            if isinstance(job, Add) and self._book.caching:
                job.sequence.keys_until((len(job.sequence.tokens) - 1) // self._block_tokens, self._block_tokens)

    def _grow_early(self, part: Part, n_others: int) -> None:
        sequence, n_more = part.sequence, 1 + len(part.drafts)
        if len(sequence.tokens) + n_more > len(sequence.blocks) * self._block_tokens and self._book.n_free() > n_others:
            sequence.blocks += self._book.allocate(1) or []

    def begin(self, jobs: list[Job]) -> Step:
        """Take the jobs, make room, choose a batch. For whoever computes it in his own time: `end` must follow before the next `begin`."""
        report = StepReport(began_ns=now_ns())
        for job in jobs:
            self._take(job, report)
        if self._arrivals:
            self._verify(report, self._blocks_in_a_step())
        self._grow(report)
        step = Step(report, self._choose())
        if not step.parts and self._arrivals:  # nobody waits for the rest of them
            self._verify(report, math.inf)
            self._grow(report)
            step.parts = self._choose()
        if step.parts:
            self._prepare(step)
        report.ended_ns = now_ns()
        return step

    def _take(self, job: Job, report: StepReport) -> None:
        match job:
            case Add(sequence):
                self._line.add(sequence)
                if sequence.blocks:
                    sequence.n_cached = sequence.n_computed
                    self._line.announce(sequence)
            case Join(sequence, checksums, n_checked):
                self._arrivals.add(sequence, checksums, n_checked)
            case Drop(id):
                dropped = self._running.pop(id, None) or self._line.remove(id) or self._arrivals.remove(id)
                if dropped is not None:
                    report.gone.append(dropped)
                    self._line.reserve()
            case Nudge():
                pass

    def _verify(self, report: StepReport, n_blocks: float) -> None:
        """Does the pool hold what the pushers sent? Who is through runs."""
        for sequence, damaged in self._arrivals.verified(n_blocks):
            if damaged:
                report.refused.append((sequence, damaged))
            else:
                sequence.trail.append((Span.KV_VERIFY, now_ns()))
                self._running[sequence.id] = sequence
                self._line.publish(sequence)

    def _blocks_in_a_step(self) -> int:
        """How many are verified in the time of a decode step of those that run: one more step is what they wait for it."""
        n_kv_tokens = sum(len(sequence.tokens) for sequence in self._running.values())
        step_ms = self._clock.predict_ms(max(1, len(self._running)), n_kv_tokens)
        return max(1, int(step_ms * self._verify_bytes_per_ms / self._runner.layout.block_bytes))

    def _grow(self, report: StepReport) -> None:
        """See that every running sequence has a block for the token this step computes; preempt from the youngest on."""
        for sequence in list(self._running.values()):
            while sequence.id in self._running and len(sequence.tokens) > len(sequence.blocks) * self._block_tokens:
                more = self._book.allocate(1)
                if more is not None:
                    sequence.blocks += more
                else:
                    self._preempt(max(self._running.values(), key=lambda each: (each.priority, each.id)))
                    report.n_preempted += 1
        self._line.reserve()

    def _preempt(self, sequence: Sequence) -> None:
        self._running.pop(sequence.id)
        self._book.free(sequence.blocks)
        sequence.blocks, sequence.n_computed, sequence.n_published, sequence.preempted = [], 0, 0, True
        sequence.trail.append((Span.DECODE_HOST, now_ns()))
        self._line.add(sequence)

    def _choose(self) -> list[Part]:
        """Every running sequence's next token, then chunks of what waits, as far as `engine.first` lets it.

        A suspect goes alone; behind each of its steps those that run have theirs, so that they stand still for one chunk of it at a time.
        """
        parts = self._alone()
        if parts:
            others = [each for each in self._running.values() if not each.lone] if self._was_alone else []
            self._was_alone = not others
            return self._with_drafts([Part(each, 1, True) for each in others[: self._max_running]]) if others else parts
        self._was_alone = False
        ready = self._line.ready(min(self._clock.budget_rows(), self._max_chunk_tokens))
        pauses = self._first == "prefill" and self._running and ready and self._n_pauses < _MOST_PAUSES
        self._n_pauses = self._n_pauses + 1 if pauses else 0
        if not pauses:
            parts = [Part(sequence, 1, True) for sequence in list(self._running.values())[: self._max_running]]
        chunks = plan_chunks(
            (len(sequence.tokens) - sequence.n_computed for sequence in ready),
            len(parts),
            0 if self._first == "decode" and parts else self._budget_rows(ready),
            self._runner.tile_rows,
            self._max_chunk_tokens,
        )
        for index, n_tokens in chunks:
            sequence = ready[index]
            parts.append(Part(sequence, n_tokens, sequence.n_computed + n_tokens == len(sequence.tokens)))
        return parts if chunks else self._with_drafts(parts)

    def _budget_rows(self, ready: list[Sequence]) -> int:
        """A long step is for the first prompt only: others in it would gain little, and have the first wait for them."""
        if not ready:
            return 0
        first = ready[0]
        n_left = len(first.tokens) - first.n_computed
        usual = self._clock.budget_rows(first.n_computed)
        if n_left <= usual or self._running or self._joining or self._line.goes_on_beside(first):
            return usual  # a stream would wait for its next token meanwhile
        return max(usual, min(self._clock.budget_rows(first.n_computed, alone=True), self._clock.tiles(n_left) * self._runner.tile_rows))

    def _with_drafts(self, parts: list[Part]) -> list[Part]:
        return parts if self._speculation is None else self._speculation.offer(parts, self._clock, len(self._running))

    def _alone(self) -> list[Part]:
        """A step of one sequence that must not share it, if there is such a one."""
        for sequence in self._running.values():
            if sequence.lone:
                return [Part(sequence, 1, True)]
        waiting = self._line.lone()
        if waiting is None:
            return []
        n_left = len(waiting.tokens) - waiting.n_computed
        n_rows = min(n_left, self._budget_rows([waiting]), self._max_chunk_tokens)
        return [Part(waiting, n_rows, n_rows == n_left)]

    def _batch(self, parts: list[Part]) -> tuple[Batch, list[Scored]]:
        ahead, self._ahead = self._ahead, None
        return rows_of(parts, self._running, ahead, self._runner.layout)

    def _prepare(self, step: Step) -> None:
        report = step.report
        step.batch, step.scored = self._batch(step.parts)
        for part in step.parts:
            if part.sequence.id in self._line:
                report.n_prefill_tokens += part.n_rows
                trails.waited(part.sequence, report.began_ns)
            else:
                report.n_decode_rows += 1
                report.n_drafted += len(part.drafts)
                if part.sequence.trail:
                    part.sequence.trail.append((Span.DECODE_QUEUE, report.began_ns))
        if self._board is not None:
            self._board.begin([part.sequence.request_id for part in step.parts], len(step.parts) == 1 and step.parts[0].sequence.lone)
        step.started_ns = now_ns()

    def end(self, step: Step, result: StepResult) -> None:
        """The batch of `step` is computed: draw conclusions from it into its report."""
        batch, report, started = step.batch, step.report, step.started_ns
        assert batch is not None
        self._prompts = None
        if step.gains is None:
            step.computed_ns = now_ns()
            self._gain(step, result)
        computed = step.computed_ns
        if self._board is not None and not step.followed_ns:
            self._board.end()
        n_rows = len(batch.tokens)
        n_kv_tokens = int(batch.positions.sum()) + n_rows
        self._clock.ran(n_rows, n_kv_tokens, (computed - started) / 1e6)
        report.push_ns = result.push_ns
        self._advance(step, result, started + self._floor_ns(*needed(step, n_rows, n_kv_tokens)))
        self._joining = False
        self._deliver(step, result)
        report.ended_ns = step.followed_ns or now_ns()

    def abandon(self, step: Step) -> None:
        """Instead of `end`, where all for whom it was computed have a Drop among the next jobs: nothing of it counts."""
        self._prompts = None
        if self._board is not None:
            self._board.end()
        step.report.n_prefill_tokens = 0
        step.report.ended_ns = now_ns()

    def _gain(self, step: Step, result: StepResult) -> None:
        """The tokens that it drew, to their sequences, up to the first that was not guessed."""
        gains: list[tuple[int, FinishReason | None] | None] = []
        goes_on = False  # whether the row before drew a token that others may follow
        for scored, token in zip(step.scored, result.ids, strict=True):
            sequence = scored.sequence
            if scored.guess >= 0 and not (goes_on and sequence.tokens[-1] == scored.guess and token >= 0):
                goes_on = False
                gains.append(None)
                continue
            finish = sequence.finish_after(token) if scored.draws else None
            gains.append((sequence.n_generated, finish))
            goes_on = scored.draws and token >= 0 and finish is None
            if scored.draws and token >= 0:
                sequence.tokens.append(token)
                step.report.n_accepted += scored.guess >= 0
        step.gains = gains
        for part in step.parts:
            if part.drafts:
                judge(part)

    def _advance(self, step: Step, result: StepResult, floor: int) -> None:
        """Its KV is there, and may be found; its time goes to those who took part."""
        push = 0
        for part in step.parts:
            sequence = part.sequence
            sequence.n_computed = len(sequence.tokens) - 1 if part.drafts else sequence.n_computed + part.n_rows
            self._line.publish(sequence)
            if sequence.target is not None:
                sequence.checksums.append(result.checksums[push])
                push += 1
        ended = step.followed_ns or now_ns()
        prefill_trail = trails.of_prefill(step, floor, result.push_ns, ended)
        if step.report.n_decode_rows:
            step.report.trail = trails.of_decode(step, floor, self._alone_until(step), ended)
        for part in step.parts:
            if part.sequence.preempted:
                part.sequence.trail.append((Span.DECODE_PREEMPTED, ended))
            elif part.sequence.id in self._line:
                part.sequence.trail += prefill_trail

    def _alone_until(self, step: Step) -> int:
        """When its decode rows would have been computed without the prompts beside them."""
        if step.report.n_prefill_tokens == 0:
            return step.computed_ns
        n_kv_tokens = sum(part.sequence.n_computed for part in step.parts if part.sequence.id in self._running)
        return min(step.computed_ns, step.started_ns + int(1e6 * self._clock.predict_ms(step.report.n_decode_rows, n_kv_tokens)))

    def _deliver(self, step: Step, result: StepResult) -> None:
        """What each logit row was for: a token of its sequence, a prompt token's score, or nothing."""
        assert step.gains is not None
        for row, (scored, gain) in enumerate(zip(step.scored, step.gains, strict=True)):
            sequence = scored.sequence
            if gain is None:
                continue
            index, finish = gain
            if not scored.draws:
                logprobs = result.logprobs[row]
                assert logprobs is not None
                if len(sequence.scores) < sequence.n_prompt - 1:  # else of what it has generated, or once more after a preemption
                    sequence.scores.append(logprobs)
                continue
            if self.on_logits is not None and result.logits is not None:
                self.on_logits(sequence, sequence.n_prompt + index, result.logits[row])
            if result.ids[row] < 0:
                if any(part.drafts for part in step.parts if part.sequence is sequence):
                    sequence.undraftable = True  # it may be a guess whose numbers are not finite: once more, alone
                else:
                    self._fail(sequence, step.report)
            else:
                self._got(Advance(sequence, index, result.ids[row], finish, result.logprobs[row], tuple(sequence.trail)), step.report)

    def _fail(self, sequence: Sequence, report: StepReport) -> None:
        self._running.pop(sequence.id, None)
        self._line.remove(sequence.id)
        report.failed.append(sequence)

    def _got(self, advance: Advance, report: StepReport) -> None:
        sequence = advance.sequence
        report.advances.append(advance)
        sequence.lone = sequence.lone and not sequence.has_gained
        sequence.has_gained = True
        sequence.trail = list(advance.trail) if sequence.side == "prefill" else []
        was_waiting = self._line.remove(sequence.id) is not None
        if sequence.side == "prefill":
            self._joining |= sequence.borrowed and advance.finish is None
            return
        if advance.finish is not None:
            self._running.pop(sequence.id, None)
        elif was_waiting:
            sequence.preempted = False
            self._running[sequence.id] = sequence
