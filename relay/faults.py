"""Faults on demand, for chaos tests: armed by a question to the whole server, struck in the process that they name.

Only a server whose config says `runtime.allow_faults` listens. What decides or diagnoses cannot import this: it is known to the composition
alone, as a tap on the messages that actors take and as a runner around the real one.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import msgspec
import structlog

from relay.engine.board import StepBoard
from relay.engine.runner import Batch, Done, Pending, Runner, StepResult, beside_host, launching
from relay.kv.layout import KVLayout
from relay.kv.pool import KVPool
from relay.messages import Address, Message
from relay.runtime.asks import Handler
from relay.runtime.host import Host

log = structlog.get_logger()


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """`action` strikes `worker` when `point` has been reached `after` times from now.

    point: `message:TYPE` when an actor takes such a message; `step` when a step begins, `layer` some milliseconds into it, `computed` as
    it ends; `now`. action:
    kill (SIGKILL, announced: it convicts no request), announce (that a kill from outside follows), stop (SIGSTOP), cut (all links, for
    `seconds`), corrupt (one bit of what the next step pushes), slow (from then on that point takes `seconds` longer each time, until it is
    armed with 0), raise (an exception, in whoever gets there); of an emulated device: lose (it, for good), exhaust (its memory, once).
    """

    worker: str
    point: str
    action: Literal["kill", "announce", "stop", "cut", "corrupt", "slow", "raise", "lose", "exhaust"]
    after: int = 1
    seconds: float = 1.0


class InjectedFault(Exception):
    """What the action `raise` raises."""


FAULT = msgspec.json.Decoder(Fault)


@runtime_checkable
class FaultyDevice(Protocol):
    """A device that can be told to fail: an emulated one."""

    def lose(self) -> None: ...
    def exhaust(self) -> None: ...


class Faults:
    """The armed faults of one worker. `device`: what it computes on, if that can be told to fail. `board`: an engine's."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self.device: FaultyDevice | None = None
        self.board: StepBoard | None = None
        self._armed: list[tuple[Fault, list[int]]] = []
        self._slow_s: dict[str, float] = {}  # by point
        self.corrupt_next = False
        host.node.on_taken = self._on_taken

    def listening(self, on_ask: Handler) -> Handler:
        """The same answers, and questions of the kind `fault` arm one."""

        async def answer(kind: str, body: bytes) -> bytes | None:
            if kind == "fault":
                return b"armed" if self.arm(FAULT.decode(body)) else None
            return await on_ask(kind, body)

        return answer

    def arm(self, fault: Fault) -> bool:
        """Whether it is for this worker, and can strike here."""
        if fault.worker != self._host.start.worker or (fault.action in ("lose", "exhaust") and self.device is None):
            return False
        log.warning("fault armed", **msgspec.structs.asdict(fault))
        if fault.point == "now":
            self._strike(fault)
        elif fault.action == "slow" and fault.seconds == 0:
            self._slow_s.pop(fault.point, None)
        else:
            self._armed.append((fault, [fault.after]))
        return True

    def reached(self, point: str) -> None:
        """Called on whatever thread reaches it."""
        for armed in list(self._armed):
            fault, left = armed
            if fault.point != point:
                continue
            left[0] -= 1
            if left[0] == 0:
                self._armed.remove(armed)
                self._strike(fault)
        if point in self._slow_s:
            time.sleep(self._slow_s[point])

    def _on_taken(self, address: Address, message: Message) -> None:
        if self._armed or self._slow_s:
            self.reached(f"message:{type(message).__name__}")

    def _strike(self, fault: Fault) -> None:
        if fault.action in ("kill", "announce") and self.board is not None:
            self.board.announce_kill()
        match fault.action:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "cut":
                self._host.cut_links(fault.seconds)
            case "corrupt":
                self.corrupt_next = True
            case "slow":
                self._slow_s[fault.point] = fault.seconds
            case "raise":
                raise InjectedFault(f"an exception was asked for at {fault.point}")
            case "lose":
                assert self.device is not None
                self.device.lose()
            case "exhaust":
                assert self.device is not None
                self.device.exhaust()


class FaultyRunner:
    """A runner that reaches the points `step`, `layer` and `computed`, corrupts what it was told to, and dies of one token, each time."""

    def __init__(self, runner: Runner, faults: Faults, poison_token: int | None) -> None:
        self._runner, self._launch, self._faults, self._poison_token = runner, launching(runner), faults, poison_token
        self.memory: KVPool = runner.memory
        self.vocab_size, self.tile_rows, self.keep_logits = runner.vocab_size, runner.tile_rows, runner.keep_logits
        self._beside = beside_host(runner)
        self.beside = self._beside is not None

    @property
    def layout(self) -> KVLayout:
        return self._runner.layout

    def step(self, batch: Batch) -> StepResult:
        return self.launch(batch).result()

    def prepare(self, batch: Batch) -> None:
        if self._beside is not None:
            self._beside.prepare(batch)

    def launch(self, batch: Batch) -> Pending:
        faults = self._faults
        if self._poison_token is not None and self._poison_token in batch.tokens:
            os.kill(os.getpid(), signal.SIGABRT)  # as a crash ends it; SIGKILL would prove little
        faults.reached("step")
        timer = threading.Timer(0.003, faults.reached, ("layer",))
        timer.daemon = True
        timer.start()
        pending = self._launch(batch)

        def result() -> StepResult:
            computed = pending.result()
            timer.cancel()
            faults.reached("computed")
            if faults.corrupt_next:
                for push in batch.pushes:
                    if len(push.target_blocks):
                        faults.corrupt_next = False
                        push.target.flip_bit(int(push.target_blocks[0]))
                        break
            return computed

        return Done(result()) if isinstance(pending, Done) else _FaultyPending(result, pending.abandon)


@dataclass(frozen=True, slots=True)
class _FaultyPending:
    result: Callable[[], StepResult]
    abandon: Callable[[], None]
