"""One life of one worker, as the supervisor sees it: from the start of its process until it is reaped, and what it died of.

In: frames of the worker. `Ready`, `Ask`, `Answer` and `Fault` are passed on to the supervisor; `Heartbeat` and `Crashed` are used here.
It ends by itself, or is killed: never ready, silent, hung in one step, not reading, talking garbage, not drained, or on somebody's word.
Whatever was being computed when it crashed, hung or fell silent is under suspicion (`relay.runtime.suspicion`).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec
import structlog
import trio

from relay.config import RuntimeConfig
from relay.errors import FrameTooLarge, RuntimeFault
from relay.runtime.child import Child
from relay.runtime.control import Outbox, close_all
from relay.runtime.frames import Answer, Ask, Begun, Control, Crashed, Fault, Heartbeat, Leave, Ready, Start
from relay.runtime.suspicion import Blame, blame_of

_EXIT_WITHIN_S = 0.5  # a dying interpreter closes its sockets before it exits with its code
_LAST_WORDS_WITHIN_S = 0.25
_STARVED_SHARE = 0.3
_BUSY_SHARE = 0.3
_EXCUSED_FOR_AT_MOST = 10  # times the limit: then it goes, whatever keeps it
_log = structlog.get_logger()


@dataclass(frozen=True)
class Death:
    """`announced`: somebody asked for it. `start_error`: starting again will not help, says the worker. `blame`: who may have caused it."""

    reason: str
    announced: bool = False
    start_error: bool = False
    blame: Blame = "nobody"


class Incarnation:
    def __init__(
        self,
        worker: str,
        epoch: int,
        settings: RuntimeConfig,
        on_frame: "Callable[[Incarnation, Ready | Ask | Answer | Fault | Leave], None]",
    ) -> None:
        self.worker, self.epoch = worker, epoch
        self.state: Literal["starting", "up", "draining"] = "starting"
        self.pid: int | None = None
        self.over = trio.Event()  # reaped
        self.started_at = trio.current_time()
        self.steps, self.step_age_s = 0, 0.0
        self.faults = 0  # links that it reported cut
        self._settings, self._on_frame = settings, on_frame
        self._child: Child | None = None
        self._outbox: Outbox | None = None
        self._ready, self._heard = trio.Event(), 0.0
        self._begun = False
        self._scheduled = trio.current_time(), (0, 0)  # when it was last looked at, and what it was
        self._starved = self._busy = False
        self._late_step = -1
        self._scope = trio.CancelScope()
        self._reason, self._announced, self._last_words = "", False, Crashed(reason="")
        self._blame: Blame = "nobody"

    def tell(self, frame: Control, fds: Mapping[str, int] | None = None) -> None:
        """Something that it must hear: if it lets so much pile up, it is killed."""
        if self._outbox is not None and not self._outbox.put(frame, fds):
            self.end("does not read its control socket")

    def offer(self, frame: Control) -> bool:
        """Something that it may miss. Raises FrameTooLarge."""
        return self._outbox is not None and self._outbox.put(frame, spare=True)

    def end(self, reason: str, *, announced: bool = False, blame: Blame = "nobody") -> None:
        """Kill it; `run` returns once it is reaped. The first reason counts."""
        if not self._reason:
            self._reason, self._announced, self._blame = reason, announced, blame
        if self._child is not None:
            self._child.kill()
        self._scope.cancel()

    async def run(self, take: Callable[[], Child], start: Start, fds: Mapping[str, int], on_started: Callable[[int], None]) -> Death:
        """Live, in a process from `take`. The descriptors stay the caller's. Afterwards the process is reaped, however this ends."""
        try:
            child = self._child = take()
        except OSError as error:
            return Death(f"cannot be started: {error}")
        self.pid = child.pid
        on_started(child.pid)
        self._outbox = Outbox(child.control)
        try:
            self._outbox.put(start, fds)
            with self._scope:
                async with trio.open_nursery() as nursery:
                    for task in (self._outbox.run, self._guard, self._watch):
                        nursery.start_soon(task)
                    await self._listen(child)
                    nursery.cancel_scope.cancel()
        finally:
            self._outbox.close()
            ended = await child.fence()
            self.over.set()
        if self.state == "draining" and ended == "exit 0" and not self._reason:
            return Death("drained", announced=True)
        if self._reason:
            return Death(self._reason, self._announced, self._last_words.start_error, self._blame)
        if self._last_words.reason:  # however its process ended then: one that takes long to exit is fenced
            return Death(self._last_words.reason, self._announced, self._last_words.start_error, "step")
        if ended == "SIGKILL":  # the kernel's way to get memory back, too
            return Death(f"{ended}, which this server did not send: possibly out of memory", blame="anybody")
        return Death(ended, self._announced, blame=blame_of(ended))

    async def _listen(self, child: Child) -> None:
        """Until end of file and, soon after, the exit. A reaped process may have left last words: they are read first."""
        while True:
            try:
                received = await child.control.receive()
            except (msgspec.DecodeError, FrameTooLarge, RuntimeFault) as error:
                self.end(f"garbage on its control socket: {error}")
                return
            if received is None:
                with trio.move_on_after(math.inf if self.state == "draining" else _EXIT_WITHIN_S) as patience:
                    await child.died()
                if patience.cancelled_caught and not self._last_words.reason:
                    self.end("closed its control socket and did not exit")
                return
            frame, fds = received
            close_all(fds.values())
            self._heard = trio.current_time()
            match frame:
                case Heartbeat():
                    self._on_heartbeat(frame)
                case Crashed():
                    self._last_words = frame
                case Begun() if not self._begun:
                    self._begun = True
                case Ready() if not self._ready.is_set():
                    self.state = "up"
                    self._ready.set()
                    self._on_frame(self, frame)
                case Ask() | Answer() | Fault() | Leave():
                    self._on_frame(self, frame)
                case _:
                    self.end(f"garbage on its control socket: {type(frame).__name__} out of place")
                    return

    def _on_heartbeat(self, beat: Heartbeat) -> None:
        """A loop that turns says nothing of an engine that does not. Two beats must agree: a pause of the whole machine ages a step too."""
        self.steps, self.step_age_s = beat.steps, beat.step_age_s
        if not self._ready.is_set() or beat.step_age_s <= self._settings.hang_s:
            self._late_step = -1
        elif self._late_step != beat.steps:
            self._late_step = beat.steps
        else:
            if self._starved and beat.step_age_s < _EXCUSED_FOR_AT_MOST * self._settings.hang_s:
                return
            self.end(
                f"hung: the step after {beat.steps} has not ended in {beat.step_age_s:.1f} s (runtime.hang_s is {self._settings.hang_s:g})",
                blame="step",
            )

    def _look_at_cores(self) -> None:
        """Whether it waited for a core, or ran, for a good part of the last round. If it waits, others have the cores, and killing it would
        not help; one that runs is at something that will end. A stopped or deadlocked process does neither."""
        if self._child is not None:
            now, (ran, waited) = trio.current_time(), self._child.scheduled_ns()
            before, (ran_before, waited_before) = self._scheduled
            self._scheduled = now, (ran, waited)
            self._starved = waited - waited_before > _STARVED_SHARE * 1e9 * (now - before)
            self._busy = ran - ran_before > _BUSY_SHARE * 1e9 * (now - before)

    async def _guard(self) -> None:
        """Kill it when it is not ready in time, and when it is silent afterwards: soon if it does nothing, late if it runs or would like
        to, for a loop that spins for ever must end as well."""
        await self._guard_start()
        round_s = self._settings.silent_s / 4
        while True:
            before = trio.current_time()
            await trio.sleep(round_s)
            now = trio.current_time()
            self._look_at_cores()
            if now - before > 2 * round_s:  # this loop itself stood still, and may not have read what was sent meanwhile
                _log.warning("supervisor_was_late", by_s=round(now - before - round_s, 3))
                self._heard = now
            elif self.state != "draining" and now - self._heard > self._settings.silent_s:  # its drain has a limit of its own
                if (self._starved or self._busy) and now - self._heard < _EXCUSED_FOR_AT_MOST * self._settings.silent_s:
                    continue
                self.end(f"silent for {now - self._heard:.1f} s (runtime.silent_s is {self._settings.silent_s:g})", blame="anybody")

    async def _guard_start(self) -> None:
        """Until it is ready. Loading takes as long as it takes, but not in a process that is stopped, nor in a spare that says nothing to
        its Start: that one is no death of this worker's."""
        settings, began = self._settings, trio.current_time()
        ran = loaded = began  # when it last ran or waited for a core; and when it was last not stopped
        give_up = began + settings.ready_within_s
        while not self._ready.is_set():
            with trio.move_on_at(min(give_up, trio.current_time() + settings.silent_s / 4)):
                await self._ready.wait()
                return
            assert self._child is not None
            now = trio.current_time()
            self._look_at_cores()
            ran = now if self._starved or self._busy else ran
            loaded = loaded if self._child.is_stopped() else now
            limit = f"(runtime.silent_s is {settings.silent_s:g})"
            if now >= give_up:
                self.end(f"not ready in {settings.ready_within_s:g} s (runtime.ready_within_s)")
            elif now - loaded > settings.silent_s:
                self.end(f"stopped for {now - loaded:.1f} s while it started {limit}", announced=True)
            elif self._child.is_spare and not self._begun and now - ran > settings.silent_s:
                self.end(f"its process, a spare, was silent for {now - ran:.1f} s {limit}", announced=True)

    async def _watch(self) -> None:
        """Second net: end of file never comes if something inherited the control socket."""
        assert self._child is not None
        await self._child.died()
        await trio.sleep(_LAST_WORDS_WITHIN_S)
        self._scope.cancel()
