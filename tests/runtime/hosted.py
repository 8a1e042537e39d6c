"""A worker for the tests: `python hosted.py CONTROL_FD ROOT_PID`. Its one actor, `probe/<worker>`, writes down what it sees.

Start.payload: "refuse" and "crash" end it while loading, "stay" makes it ignore a drain, "bye ADDRESS" send a `Revoke` when it drains,
"hurried" ends a drain only once it is told to cut short what is unfinished,
"block" stop its loop for ever once it is ready, after printing "blocked".
A question's kind is what to do, its body "<worker> <argument>"; workers that are not named have nothing to say.
  saw TEXT       when something with TEXT was seen: all lines
  post ADDRESS   `Revoke` to that probe, which answers with `Returned`
  crash TEXT     its actor raises ValueError(TEXT)
  fd NAME        what lies in its own descriptor; fd ACTOR@EPOCH NAME: in one that a peer shared
  hang           its engine stands still from now on
  mute           it never answers
  spin SECONDS   its loop computes for so long before it turns again
  ask KIND BODY  what the whole server says to that, as seen from this worker
  fail           its handler raises
"""
# ruff: noqa: E402

import atexit
import os
import sys
import time
from functools import partial

import msgspec
import trio

sys.modules["rich"] = None  # type: ignore[assignment]  # structlog would import it, a quarter of the time a worker takes to start

from relay import log
from relay.errors import ModelError
from relay.messages import Address, Down, Refused, Returned, Revoke, Up
from relay.runtime.frames import Start
from relay.runtime.host import Host, Hosted, run_host
from relay.runtime.node import Context


class Probe:
    def __init__(self, start: Start, fds: dict[str, int], host: Host, behaviour: str) -> None:
        self._start, self._fds, self._host, self._behaviour = start, fds, host, behaviour
        self._lines: list[str] = []
        self._changed = trio.Event()
        self._hangs = False
        self.hurried = trio.Event()

    async def run(self, context: Context) -> None:
        self._context = context
        async for message in context.inbox:
            match message:
                case Up():
                    self._see(f"up {message.address}")
                    context.monitor(message.address)
                case Down():
                    suspects = f" suspects {', '.join(message.suspects)}" if message.suspects else ""
                    self._see(f"down {message.address} {message.reason}{suspects}{' alone' if message.lone else ''}")
                case Revoke():
                    self._see("revoke")
                    context.post(message.decode, Returned(request_id="r", attempt=1, reason=str(context.address)))
                case Returned():
                    self._see(f"returned {message.reason}")
                case Refused():
                    raise ValueError(message.message)
                case _:
                    raise AssertionError(message)

    def progress(self) -> tuple[int, float]:
        if self._behaviour == "block" and self._lines:
            print("blocked", flush=True)
            time.sleep(600)
        return (17, 99.0) if self._hangs else (17, 0.0)

    async def drain(self) -> None:
        if self._behaviour == "stay":
            await trio.sleep_forever()
        if self._behaviour == "hurried":
            await self.hurried.wait()
        verb, _, to = self._behaviour.partition(" ")
        if verb == "bye":
            self._context.post(address(to), Revoke(request_id="r", attempt=1, decode=self._context.address))

    async def answer(self, kind: str, body: bytes) -> bytes | None:
        worker, _, argument = body.decode().partition(" ")
        if worker not in (self._start.worker, "*"):
            return None
        match kind:
            case "saw":
                while not any(argument in line for line in self._lines):
                    await self._changed.wait()
                return "\n".join(self._lines).encode()
            case "post":
                self._context.post(address(argument), Revoke(request_id="r", attempt=1, decode=self._context.address))
            case "crash":
                words = Refused(request_id="r", attempt=1, code="", message=argument)
                self._context.post(self._context.address, words)
            case "linger":
                atexit.register(time.sleep, 60)
            case "fd":
                peer, _, name = argument.rpartition(" ")
                fds = self._host.peer_fds(address(peer)) if peer else self._fds
                return f"{sorted(fds)} {os.pread(fds[name], 100, 0).decode() if name in fds else ''}".encode()
            case "hang":
                self._hangs = True
            case "spin":
                until = time.monotonic() + float(argument)
                while time.monotonic() < until:
                    pass
            case "mute":
                await trio.sleep_forever()
            case "ask":
                what, _, rest = argument.partition(" ")
                return msgspec.json.encode(await self._host.ask(what, rest.encode(), 20.0))
            case "fail":
                raise RuntimeError("this handler is broken")
        return b"done"

    def _see(self, line: str) -> None:
        self._lines.append(line)
        self._changed.set()
        self._changed = trio.Event()


def address(text: str) -> Address:
    actor, _, epoch = text.rpartition("@")
    return Address(actor, int(epoch))


async def assemble(start: Start, fds: dict[str, int], host: Host) -> Hosted:
    await trio.lowlevel.checkpoint()
    log.configure(start.worker, level="error", terminal=False)
    behaviour = start.payload.decode()
    if behaviour == "refuse":
        raise ModelError("the model is not one that is served")
    if behaviour == "crash":
        raise ValueError("boom while loading")
    probe = Probe(start, fds, host, behaviour)
    return Hosted(
        actors={f"probe/{start.worker}": probe.run},
        on_ask=probe.answer,
        progress=probe.progress,
        on_drain=probe.drain,
        on_hurry=probe.hurried.set,
        background=[partial(trio.sleep, 0)],
    )


if __name__ == "__main__":
    run_host(int(sys.argv[1]), int(sys.argv[2]), assemble)
