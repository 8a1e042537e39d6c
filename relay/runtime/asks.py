"""Questions to the whole server: who was asked, who has answered, and by when the rest is called silent."""

import itertools
from collections.abc import Awaitable, Callable, Mapping

import structlog
import trio

from relay.runtime.frames import Answer, Answers, Ask

Handler = Callable[[str, bytes], Awaitable[bytes | None]]
SUPERVISOR = "supervisor"
_MOST_S = 60.0
_log = structlog.get_logger()


async def answer_safely(handler: Handler, kind: str, body: bytes) -> tuple[bool, bytes | None]:
    """(whether it answered, the answer). An outer edge: a question must not end the process that is asked, so its error is only logged."""
    try:
        return True, await handler(kind, body)
    except Exception:
        _log.exception("ask_failed", kind=kind)
        return False, None


class _Pending:
    def __init__(self, absent: tuple[str, ...]) -> None:
        self.waiting: dict[str, int] = {}  # worker to epoch
        self.answers: dict[str, bytes] = {}
        self.silent = dict.fromkeys(absent)
        self.done = trio.Event()

    def settle(self, who: str, body: bytes | None = None, *, silent: bool = False) -> None:
        del self.waiting[who]
        if silent:
            self.silent[who] = None
        elif body is not None:
            self.answers[who] = body
        if not self.waiting:
            self.done.set()


class Asks:
    """`handler` is the root's own; it alone answers kinds that begin with "admin."."""

    def __init__(self, handler: Handler | None) -> None:
        self._handler = handler
        self._ids = itertools.count(1)
        self._open: dict[int, _Pending] = {}

    async def gather(
        self, kind: str, body: bytes, deadline_s: float, live: Mapping[str, tuple[int, Callable[[Ask], bool]]], absent: tuple[str, ...]
    ) -> Answers:
        """Ask all of `live` (worker to epoch and how to ask it). `absent` workers are silent without being asked."""
        if kind.startswith("admin."):
            live, absent = {}, ()
        ask_id, pending = next(self._ids), _Pending(absent)
        self._open[ask_id] = pending
        try:
            ask = Ask(ask_id=ask_id, kind=kind, body=body, deadline_s=deadline_s)
            for worker, (epoch, offer) in live.items():
                if offer(ask):
                    pending.waiting[worker] = epoch
                else:
                    pending.silent[worker] = None
            with trio.move_on_after(min(deadline_s, _MOST_S)):
                async with trio.open_nursery() as nursery:
                    if self._handler is not None:
                        pending.waiting[SUPERVISOR] = 0
                        nursery.start_soon(self._answer_ourselves, self._handler, kind, body, pending)
                    if pending.waiting:
                        await pending.done.wait()
        finally:
            del self._open[ask_id]
        return Answers(ask_id=0, answers=pending.answers, silent=tuple(sorted(pending.silent | dict.fromkeys(pending.waiting))))

    def answered(self, worker: str, epoch: int, answer: Answer) -> None:
        """Too late, or from another life than was asked: of no effect."""
        pending = self._open.get(answer.ask_id)
        if pending is not None and pending.waiting.get(worker) == epoch:
            pending.settle(worker, answer.body, silent=answer.failed)

    def lost(self, worker: str, epoch: int) -> None:
        """The worker is dead: nobody waits for it any longer."""
        for pending in self._open.values():
            if pending.waiting.get(worker) == epoch:
                pending.settle(worker, silent=True)

    async def _answer_ourselves(self, handler: Handler, kind: str, body: bytes, pending: _Pending) -> None:
        answered, answer = await answer_safely(handler, kind, body)
        pending.settle(SUPERVISOR, answer, silent=not answered)
