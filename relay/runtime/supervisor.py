"""Starts the workers, tells each who is up and down, restarts the dead, fences the hung, drains, and gathers answers of the whole server.

In: what workers say (by way of `Incarnation`), `drain`, `kill`, `ask`. Out: `Start`, `WorkerUp`, `WorkerDown`, `Drain`, `Ask`, `Answers`.
Ends when all workers have drained, or raises StartError: a worker says that it cannot start, or one died too often (TooManyRestarts) whose
role nobody else serves. Before that those of the lowest drain rank, the gateways, end their streams. A worker that died too often while its
role is served rests, longer each time, before it starts again.

Who is fenced for a link that stays cut: the one that cannot be reached, at the first report of a life; at further reports the reporter
itself, since then the fault is more likely its own. Both start again, so a wrong guess costs one restart.
"""

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import msgspec
import structlog
import trio

from relay.config import RuntimeConfig
from relay.errors import FrameTooLarge, StartError
from relay.runtime.asks import Asks, Handler
from relay.runtime.child import Child
from relay.runtime.frames import Answer, Answers, Ask, Control, Drain, Fault, Leave, Ready, Start, WorkerDown, WorkerUp
from relay.runtime.incarnation import Death, Incarnation
from relay.runtime.peers import socket_name
from relay.runtime.restart import RestartPolicy
from relay.runtime.spares import Spares
from relay.runtime.suspicion import Suspicion

_SIGNALS_ARRIVE_WITHIN_S = 0.25
_UNREADY_LIVES = 4
_ENDINGS_WITHIN_S = 2.0  # streams that are cut short end in an event, if their clients read
_LATER_RANKS_S = 2.0  # what a rank has to drain when those before it used up the deadline
_log = structlog.get_logger()


def _no_fds(epoch: int) -> dict[str, int]:
    return {}


def _nobody() -> tuple[tuple[str, ...], bool]:
    return (), False


@dataclass(frozen=True)
class WorkerSpec:
    """One worker process, in all its lives.

    fds: called with each new epoch, before its start; what it returns goes to the worker by name. They stay the callable's: the supervisor
    neither duplicates nor closes them. They must stay open while the epoch lives, and since the next call comes after the old process is
    reaped, that call is the place to close the old ones (a new memfd per epoch; the root's descriptor makes a kill a mere unmapping).
    suspects: asked once a life has ended that nobody wanted to end: the requests whose step it died in, and whether that step was one of a
    single request that is under suspicion. share: names among them that every other worker gets with `WorkerUp`. drain_rank: lower ranks
    drain first. roles: what it is there for; reserve: what it does too while nobody else lives who could.
    """

    name: str
    payload: bytes = b""
    fds: Callable[[int], dict[str, int]] = _no_fds
    share: tuple[str, ...] = ()
    drain_rank: int = 0
    suspects: Callable[[], tuple[tuple[str, ...], bool]] = _nobody
    roles: tuple[str, ...] = ()
    reserve: tuple[str, ...] = ()


class WorkerRow(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the process table. `steps` and `step_age_s` are of the last heartbeat. Who rests died too often to start again now."""

    worker: str
    pid: int | None
    epoch: int
    restarts: int
    state: Literal["starting", "up", "draining", "down", "resting", "ended"]
    last_death: str
    steps: int
    step_age_s: float


class OnEvent(Protocol):
    """Told of spare_started, worker_started, worker_ready, worker_died, worker_restarting, worker_rests, worker_refused, draining and
    drained, with their fields."""

    def __call__(self, name: str, /, **fields: str | int | float) -> None: ...


@dataclass
class _Member:
    """What outlives the lives of one worker."""

    spec: WorkerSpec
    policy: RestartPolicy
    epoch: int = 0
    rests: bool = False
    life: Incarnation | None = None
    fds: dict[str, int] = field(default_factory=dict)
    up: WorkerUp | None = None
    last_down: WorkerDown | None = None
    last_death: str = ""
    ready_once: trio.Event = field(default_factory=trio.Event)
    drain: trio.Event = field(default_factory=trio.Event)
    ended: trio.Event = field(default_factory=trio.Event)

    def shared(self) -> dict[str, int]:
        return {name: self.fds[name] for name in self.spec.share}

    def serves(self, role: str) -> bool:
        """Whether it has that role and can be counted on: it is up, or will be soon."""
        has = role in self.spec.roles or role in self.spec.reserve
        return has and not self.rests and (self.up is not None or self.policy.too_many(trio.current_time()) is None)


class Supervisor:
    """`command` starts a worker once its control descriptor's number and our pid are added: [sys.executable, "-m", "relay.worker"].

    `on_event` is told what `OnEvent` lists. `on_ask(kind, body)` is the root's own answer to whole-server questions, None if it has none.
    `child` starts a worker in the place of `command`: the simulation's.
    """

    def __init__(
        self,
        run_dir: Path,
        specs: Sequence[WorkerSpec],
        settings: RuntimeConfig,
        command: Sequence[str],
        on_event: OnEvent | None = None,
        on_ask: Handler | None = None,
        child: Callable[[], Child] | None = None,
    ) -> None:
        names = [spec.name for spec in specs]
        if len(dict.fromkeys(names)) != len(names) or any("/" in name or not name for name in names):
            raise StartError(f"worker names must differ, and be file names: {', '.join(names)}")
        self._run_dir, self._settings, self._on_event = run_dir, settings, on_event
        self._spares = Spares(command, settings.spares, self._all_up, lambda pid: self._tell_event("spare_started", pid=pid), child)
        self._members = {spec.name: _Member(spec, self._policy(spec.name)) for spec in specs}
        self._asks = Asks(on_ask)
        self._suspicion = Suspicion()
        self._failure: StartError | None = None
        self._draining = False

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until drained; started once every worker was ready once (or drained before). No worker is left, however this ends."""
        async with trio.open_nursery() as around:
            around.start_soon(self._spares.run)
            async with trio.open_nursery() as self._nursery:
                for member in self._members.values():
                    self._nursery.start_soon(self._keep, member)
                for member in self._members.values():
                    await member.ready_once.wait()
                task_status.started()
            around.cancel_scope.cancel()
        if self._failure is not None:
            raise self._failure

    async def drain(self, deadline_s: float | None = None) -> None:
        """Let the workers finish, rank after rank, and end; who has not by `deadline_s` (default: runtime.drain_s) is killed."""
        if self._draining:
            return
        self._draining = True
        deadline = trio.current_time() + (self._settings.drain_s if deadline_s is None else deadline_s)
        for rank in sorted(dict.fromkeys(member.spec.drain_rank for member in self._members.values())):
            members = [member for member in self._members.values() if member.spec.drain_rank == rank]
            self._tell_event("draining", workers=", ".join(member.spec.name for member in members))
            for member in members:
                self._ask_to_drain(member)
            with trio.move_on_at(deadline):
                for member in members:
                    await member.ended.wait()
            for member in members:
                if member.life is not None:
                    member.life.end("did not drain in time")
            for member in members:
                await member.ended.wait()
            deadline = max(deadline, trio.current_time() + _LATER_RANKS_S)
        self._tell_event("drained")

    async def drain_on_signal(
        self, deadline_s: float | None = None, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Drain at the first SIGTERM or SIGINT; a second one has streams end in an event at once, a third one waits for nothing."""
        hurried = False
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            task_status.started()
            async with trio.open_nursery() as nursery:
                async for _ in signals:
                    if not self._draining:
                        nursery.start_soon(self.drain, deadline_s)
                    elif not hurried:
                        hurried = True
                        nursery.start_soon(self._hurry)
                    else:
                        self._stop_at_once()

    def recycle(self, worker: str, deadline_s: float | None = None) -> bool:
        """Drain one worker and start it again; who has not drained by `deadline_s` is killed. Whether there was such a worker up."""
        member = self._members.get(worker)
        if self._draining or member is None or member.life is None or member.life.state != "up":
            return False
        self._tell_event("draining", workers=worker)
        member.life.state = "draining"
        member.life.tell(Drain())
        self._nursery.start_soon(self._limit, member, member.life, self._settings.drain_s if deadline_s is None else deadline_s)
        return True

    async def _limit(self, member: _Member, life: Incarnation, deadline_s: float) -> None:
        with trio.move_on_after(deadline_s):
            await life.over.wait()
        if member.life is life and not life.over.is_set():
            life.end("did not drain in time", announced=True)

    async def _on_leave(self, life: Incarnation) -> None:
        """A worker was told by a signal to go. A service manager tells everyone at once, the root too: then all are drained in order."""
        await trio.sleep(_SIGNALS_ARRIVE_WITHIN_S)
        self.recycle(life.worker)

    def kill(self, worker: str, reason: str = "killed on request") -> bool:
        """SIGKILL, announced: it does not count towards the restart intensity. Whether there was such a worker alive."""
        member = self._members.get(worker)
        if member is None or member.life is None:
            return False
        member.life.end(reason, announced=True)
        return True

    async def ask(self, kind: str, body: bytes, deadline_s: float) -> Answers:
        """Ask every worker that is up, and the root's handler. Those that are just dead or starting are named among the silent."""
        live = {m.spec.name: (m.epoch, m.life.offer) for m in self._members.values() if m.up is not None and m.life is not None}
        absent = tuple(name for name, m in self._members.items() if name not in live and not m.ended.is_set())
        return await self._asks.gather(kind, body, deadline_s, live, absent)

    def spares(self) -> tuple[int, ...]:
        """The pids of processes that wait to replace a dead one."""
        return self._spares.pids()

    def resting(self) -> tuple[str, ...]:
        """Workers that died too often to be started again now; others have their roles."""
        return tuple(name for name, member in self._members.items() if member.rests)

    def _all_up(self) -> bool:
        return not self._draining and all(member.up is not None for member in self._members.values())

    def table(self) -> tuple[WorkerRow, ...]:
        return tuple(self._row(member) for member in self._members.values())

    # --- lives

    async def _keep(self, member: _Member) -> None:
        """One for one: each worker is restarted on its own account."""
        settings, name = self._settings, member.spec.name
        while not member.drain.is_set():
            member.epoch += 1
            death = await self._live(member)
            if member.drain.is_set():
                break
            try:
                if death.start_error and not member.ready_once.is_set():
                    raise StartError(f"worker {name} cannot start: {death.reason}")
                if not death.announced and not member.ready_once.is_set() and member.epoch >= _UNREADY_LIVES:
                    raise StartError(f"worker {name} died {member.epoch} times before it was ever ready; the last time: {death.reason}")
                wait_s = settings.first_backoff_s if death.announced else self._wait_of(member, death)
            except StartError as error:
                await self._give_up(error, name)
                return
            self._tell_event("worker_restarting", worker=name, epoch=member.epoch + 1, in_s=round(wait_s, 3))
            with trio.move_on_after(wait_s):
                await member.drain.wait()
            member.rests = False
        member.rests = False
        member.ended.set()
        member.ready_once.set()

    def _policy(self, name: str) -> RestartPolicy:
        settings = self._settings
        return RestartPolicy(
            name,
            max_restarts=settings.max_restarts,
            within_s=settings.within_s,
            first_s=settings.first_backoff_s,
            most_s=settings.most_backoff_s,
        )

    def _wait_of(self, member: _Member, death: Death) -> float:
        """How long it stays down now. Raises TooManyRestarts if it should for long, and cannot."""
        now, roles = trio.current_time(), member.spec.roles
        wait_s = member.policy.died(now, death.reason)
        too_many = member.policy.too_many(now)
        if too_many is not None:
            others = [other for other in self._members.values() if other is not member]
            if not roles or not all(any(other.serves(role) for other in others) for role in roles):
                raise too_many
            member.rests = True
            self._tell_event("worker_rests", worker=member.spec.name, reason=str(too_many), in_s=round(wait_s, 3))
        return wait_s

    async def _give_up(self, error: StartError, worker: str) -> None:
        """The server ends with this error, but streams end first."""
        if self._failure is None:
            self._failure, self._draining = error, True
            self._tell_event("worker_refused", worker=worker, reason=str(error))
            await self._end_streams()
            self._nursery.cancel_scope.cancel()

    async def _end_streams(self) -> None:
        """Who drains first ends what it has, now. Nobody starts again."""
        lowest = min(member.spec.drain_rank for member in self._members.values())
        first = [member for member in self._members.values() if member.spec.drain_rank == lowest]
        for member in self._members.values():
            member.drain.set()
        for member in first:
            if member.life is not None and member.up is not None:
                member.life.state = "draining"
                member.life.tell(Drain(whole=True, at_once=True))
        with trio.move_on_after(_ENDINGS_WITHIN_S):
            for member in first:
                if member.up is not None:
                    await member.ended.wait()

    async def _live(self, member: _Member) -> Death:
        """One life, from its start to the news of its death."""
        spec, settings, epoch = member.spec, self._settings, member.epoch
        life = member.life = Incarnation(spec.name, epoch, settings, self._on_frame)
        death = Death("the server ended")
        try:
            try:
                member.fds = spec.fds(epoch)
            except OSError as error:  # no memory or no descriptors left, for now
                death = Death(f"cannot be started: {error}")
                return death
            start = Start(
                worker=spec.name,
                epoch=epoch,
                run_dir=str(self._run_dir),
                heartbeat_s=settings.heartbeat_s,
                link_deadline_s=settings.link_deadline_s,
                window=settings.window,
                fd_names=tuple(member.fds),
                payload=spec.payload,
            )
            death = await life.run(
                self._spares.take, start, member.fds, lambda pid: self._tell_event("worker_started", worker=spec.name, epoch=epoch, pid=pid)
            )
        finally:
            member.life, member.last_death = None, death.reason
            with suppress(FileNotFoundError):
                os.unlink(self._run_dir / socket_name(spec.name, epoch))
            self._asks.lost(spec.name, epoch)
            self._tell_event("worker_died", worker=spec.name, epoch=epoch, reason=death.reason)
            if member.up is not None:
                actors, member.up = member.up.actors, None
                suspects, lone = spec.suspects() if death.blame != "nobody" else ((), False)
                convicts = self._suspicion.convicts(suspects, lone, death.blame)
                member.last_down = WorkerDown(
                    worker=spec.name, epoch=epoch, actors=actors, reason=death.reason, suspects=suspects, lone=convicts
                )
                self._tell_others(member, member.last_down)
        return death

    def _ask_to_drain(self, member: _Member) -> None:
        member.drain.set()
        if member.life is not None:
            if member.life.state == "starting":
                member.life.end("not ready when the server stopped", announced=True)
            else:
                member.life.state = "draining"
                member.life.tell(Drain(whole=True))

    async def _hurry(self) -> None:
        await self._end_streams()
        self._stop_at_once()

    def _stop_at_once(self) -> None:
        for member in self._members.values():
            member.drain.set()
            if member.life is not None:
                member.life.end("the server was told to stop at once", announced=True)

    # --- what workers say

    def _on_frame(self, life: Incarnation, frame: Ready | Ask | Answer | Fault | Leave) -> None:
        match frame:
            case Leave():
                self._nursery.start_soon(self._on_leave, life)
            case Ready():
                self._on_ready(life, frame)
            case Ask():
                self._nursery.start_soon(self._on_ask, life, frame)
            case Answer():
                self._asks.answered(life.worker, life.epoch, frame)
            case Fault():
                self._on_fault(life, frame)

    def _on_ready(self, life: Incarnation, ready: Ready) -> None:
        member = self._members[life.worker]
        up = WorkerUp(worker=life.worker, epoch=life.epoch, actors=ready.actors, fd_names=member.spec.share)
        for other in self._members.values():
            if other.up is not None and other.life is not None:
                life.tell(other.up, other.shared())
            elif other.last_down is not None:  # somebody may still name it: the newcomer must know that it is dead
                life.tell(other.last_down)
        self._tell_others(member, up, member.shared())
        life.tell(msgspec.structs.replace(up, fd_names=()))
        member.up = up
        member.ready_once.set()
        if self._all_up():
            self._spares.refill()
        self._tell_event("worker_ready", worker=life.worker, epoch=life.epoch, in_s=round(trio.current_time() - life.started_at, 3))

    async def _on_ask(self, life: Incarnation, ask: Ask) -> None:
        gathered = await self.ask(ask.kind, ask.body, ask.deadline_s)
        answers, silent = dict(gathered.answers), gathered.silent
        while True:
            try:
                life.offer(Answers(ask_id=ask.ask_id, answers=answers, silent=silent))
            except FrameTooLarge:
                largest = max(answers, key=lambda worker: (len(answers[worker]), worker))
                _log.warning("answer_too_large", kind=ask.kind, worker=largest, n_bytes=len(answers.pop(largest)))
                silent = tuple(sorted((*silent, largest)))
            else:
                return

    def _on_fault(self, life: Incarnation, fault: Fault) -> None:
        accused = self._members.get(fault.worker)
        if accused is None or accused.life is None or accused.epoch != fault.epoch:
            return
        life.faults += 1
        if life.faults == 1:
            accused.life.end(f"not reached by {life.worker} for {self._settings.link_deadline_s:g} s (runtime.link_deadline_s)")
        else:
            life.end(f"reported {life.faults} unreachable workers, the last one {fault.worker}")

    # --- telling

    def _tell_others(self, member: _Member, frame: Control, fds: Mapping[str, int] | None = None) -> None:
        for other in self._members.values():
            if other is not member and other.up is not None and other.life is not None:
                other.life.tell(frame, fds)

    def _tell_event(self, name: str, **fields: str | int | float) -> None:
        (_log.error if name in ("worker_rests", "worker_refused") else _log.info)(name, **fields)
        if self._on_event is not None:
            self._on_event(name, **fields)

    def _row(self, member: _Member) -> WorkerRow:
        life = member.life
        return WorkerRow(
            worker=member.spec.name,
            pid=life.pid if life is not None else None,
            epoch=member.epoch,
            restarts=max(member.epoch - 1, 0),
            state=life.state if life is not None else "ended" if member.ended.is_set() else "resting" if member.rests else "down",
            last_death=member.last_death,
            steps=life.steps if life is not None else 0,
            step_age_s=life.step_age_s if life is not None else 0.0,
        )
