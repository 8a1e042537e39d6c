"""The worker's side: `run_host` is the whole life of a worker process, but for what the composition's `assemble` puts into it.

In: `Start`, then the supervisor's word on others, questions, `Drain`. Out: `Ready`, heartbeats, answers, faults, last words.
Order: the control socket brings `Start`; `assemble` imports and loads, for as long as it needs; the link socket accepts; the actors run;
`Ready`. From there on the supervisor's limits count. An actor that raises or returns ends the worker (exit code 1), and the text of the
exception is its last words; drained, it exits with 0; when the root dies, the kernel kills it. SIGINT is ignored, and SIGTERM only passed
on to the supervisor: a service manager sends it to a whole group of processes, and only the root knows the order in which to drain.
"""

import inspect
import itertools
import select
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import structlog
import trio

from relay.errors import FrameTooLarge, RuntimeFault, StartError, first_cause
from relay.messages import Address
from relay.runtime.asks import SUPERVISOR, Handler, answer_safely
from relay.runtime.child import die_with
from relay.runtime.control import ControlChannel, Outbox
from relay.runtime.frames import (
    Answer,
    Answers,
    Ask,
    Begun,
    Crashed,
    Drain,
    Fault,
    Heartbeat,
    Leave,
    Ready,
    Start,
    WorkerDown,
    WorkerUp,
    pack,
)
from relay.runtime.node import Context, Node
from relay.runtime.peers import Peers

_ANSWERS_ARE_LATE_S = 1.0
_FLUSH_WITHIN_S = 1.0
_LAST_WORDS_WITHIN_S = 1.0
_log = structlog.get_logger()


def _no_engine() -> tuple[int, float]:
    return 0, 0.0


async def _nothing_to_finish() -> None:
    await trio.lowlevel.checkpoint()


def _nothing_to_cut_short() -> None:
    pass


async def _nothing_to_say(kind: str, body: bytes) -> bytes | None:
    await trio.lowlevel.checkpoint()
    return None


@dataclass(frozen=True)
class Hosted:
    """What lives in this worker.

    actors: name to run function; one that ends, ends the worker. on_ask: (kind, body) to an answer, or None. progress: (steps ended, age
    in seconds of the one that runs, 0 if none does). on_drain: returns when everything is finished. on_hurry: what is unfinished ends in an
    error, so that on_drain returns soon. background: beside the actors, may end.
    """

    actors: Mapping[str, Callable[[Context], Awaitable[None]]]
    on_ask: Handler = _nothing_to_say
    progress: Callable[[], tuple[int, float]] = _no_engine
    on_drain: Callable[[], Awaitable[None]] = _nothing_to_finish
    on_hurry: Callable[[], None] = _nothing_to_cut_short
    background: Sequence[Callable[[], Awaitable[None]]] = field(default_factory=tuple)


class Host:
    """What the composition may use of the worker it lives in: `start`, `node`, `ask`, `peer_fds`, and once it drains `is_last_life`."""

    def __init__(self, channel: ControlChannel, start: Start) -> None:
        self.start = start
        self.node = Node(start.worker, start.epoch, window=start.window, hold_early=True)
        self._channel, self._outbox = channel, Outbox(channel)
        self._peers = Peers(self.node, Path(start.run_dir), link_deadline_s=start.link_deadline_s, report=self._report)
        self._ids = itertools.count(1)
        self._asked: dict[int, trio.Event] = {}
        self._answers: dict[int, Answers] = {}
        self._draining = False
        self.is_last_life = False  # the whole server drains

    async def ask(self, kind: str, body: bytes, deadline_s: float) -> Answers:
        """One answer for the whole server: what each worker said, and who was silent. Kinds "admin.*" go to the root alone."""
        ask_id, answered = next(self._ids), trio.Event()
        self._asked[ask_id] = answered
        try:
            self._outbox.put(Ask(ask_id=ask_id, kind=kind, body=body, deadline_s=deadline_s), spare=True)
            with trio.move_on_after(deadline_s + _ANSWERS_ARE_LATE_S):
                await answered.wait()
        finally:
            del self._asked[ask_id]
        return self._answers.pop(ask_id, Answers(ask_id=ask_id, answers={}, silent=(SUPERVISOR,)))

    def peer_fds(self, address: Address) -> dict[str, int]:
        """The descriptors which that life shares; none if it is dead or not known yet. They stay ours, and are closed before its `Down`
        is told: map or duplicate one before the next await, and never keep the number. A mapping stays valid until it is unmapped."""
        return self._peers.fds(address)

    def cut_links(self, seconds: float) -> None:
        """For chaos tests."""
        self._peers.cut(seconds)

    async def serve(self, assemble: "Assemble", fds: dict[str, int]) -> None:
        """Until drained. Raises what an actor raised, or trio.BrokenResourceError when the root is gone."""
        assembled = assemble(self.start, fds, self)
        hosted = await assembled if inspect.isawaitable(assembled) else assembled
        async with trio.open_nursery() as nursery:
            await nursery.start(self._peers.run)
            contexts = {name: self.node.open(name) for name in hosted.actors}
            for task in hosted.background:
                nursery.start_soon(task)
            for name, run in hosted.actors.items():
                nursery.start_soon(self._live, name, run, contexts[name])
            nursery.start_soon(self._outbox.run)
            self._outbox.put(Ready(actors=tuple(hosted.actors)))
            nursery.start_soon(self._beat, hosted.progress)
            nursery.start_soon(self._pass_on_sigterm)
            await self._obey(hosted, nursery)

    async def _obey(self, hosted: Hosted, nursery: trio.Nursery) -> None:
        while (received := await self._channel.receive()) is not None:
            frame, fds = received
            match frame:
                case WorkerUp():
                    self._peers.up(frame, fds)
                case WorkerDown():
                    self._peers.down(frame)
                case Ask():
                    nursery.start_soon(self._answer, hosted.on_ask, frame)
                case Answers():
                    if frame.ask_id in self._asked:
                        self._answers[frame.ask_id] = frame
                        self._asked[frame.ask_id].set()
                case Drain():
                    self.is_last_life = self.is_last_life or frame.whole
                    if frame.at_once:
                        hosted.on_hurry()
                    if not self._draining:
                        self._draining = True
                        nursery.start_soon(self._drain, hosted.on_drain, nursery.cancel_scope)
                case _:
                    raise RuntimeFault(f"{type(frame).__name__} is not for a worker")
        raise trio.BrokenResourceError("the root is gone")

    async def _live(self, name: str, run: Callable[[Context], Awaitable[None]], context: Context) -> None:
        await run(context)
        if not self._draining:
            raise RuntimeFault(f"actor {name} returned though the worker was not told to drain")

    async def _drain(self, on_drain: Callable[[], Awaitable[None]], scope: trio.CancelScope) -> None:
        await on_drain()
        with trio.move_on_after(_FLUSH_WITHIN_S):
            await self._peers.flushed()
        scope.cancel()

    async def _beat(self, progress: Callable[[], tuple[int, float]]) -> None:
        while True:
            steps, step_age_s = progress()
            self._outbox.put(Heartbeat(steps=steps, step_age_s=step_age_s), spare=True)
            await trio.sleep(self.start.heartbeat_s)

    async def _pass_on_sigterm(self) -> None:
        with trio.open_signal_receiver(signal.SIGTERM) as signals:
            async for _ in signals:
                self._outbox.put(Leave())

    async def _answer(self, on_ask: Handler, ask: Ask) -> None:
        with trio.move_on_after(ask.deadline_s):
            answered, body = await answer_safely(on_ask, ask.kind, ask.body)
            try:
                self._outbox.put(Answer(ask_id=ask.ask_id, body=body, failed=not answered), spare=True)
            except FrameTooLarge as error:
                _log.warning("answer_too_large", kind=ask.kind, error=str(error))
                self._outbox.put(Answer(ask_id=ask.ask_id, body=None, failed=True), spare=True)

    def _report(self, fault: Fault) -> None:
        self._outbox.put(fault)


Assemble = Callable[[Start, dict[str, int], Host], Hosted | Awaitable[Hosted]]


def run_host(fd: int, ppid: int, assemble: Assemble, preload: Callable[[], None] = lambda: None) -> None:
    """Be a worker, on the main thread, until the process ends: returns when drained, else exits with 1.

    `fd` is the control socket, `ppid` the root's pid. `assemble(start, fds, host)` owns `fds`; raising StartError it says that starting
    again will not help. `preload` is called where no `Start` has come yet: we are a spare, and have the time.
    """
    die_with(ppid)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    sock = socket.socket(fileno=fd)
    sock.set_inheritable(False)  # a grandchild that held it would keep the end of file away
    if not select.select([sock], [], [], 0)[0]:
        preload()
    if not trio.run(_main, sock, assemble):
        sys.exit(1)


async def _main(sock: socket.socket, assemble: Assemble) -> bool:
    """The worker's outer edge: whatever ends it is told to the supervisor and logged. Returns whether it was drained."""
    channel = ControlChannel(sock)
    try:
        received = await channel.receive()
        start, fds = received or (None, {})
        if not isinstance(start, Start):
            raise RuntimeFault(f"expected Start, found {type(start).__name__}")
        await channel.send(pack(Begun()))
        await Host(channel, start).serve(assemble, fds)
    except Exception as error:
        cause = first_cause(error)
        with trio.move_on_after(_LAST_WORDS_WITHIN_S):
            try:
                await channel.send(pack(_last_words(cause)))
            except trio.BrokenResourceError:
                return False
        _log.error("worker_crashed", error=str(cause), exc_info=error)
        return False
    finally:
        channel.close()
    return True


def _last_words(cause: Exception) -> Crashed:
    if isinstance(cause, StartError):
        return Crashed(reason=str(cause), start_error=True)
    return Crashed(reason=f"{type(cause).__name__}: {cause}"[:4096])
