"""A worker process as the real supervisor holds it, on virtual time: its end of the control channel plays a life's host.

Frames are packed and decoded as on a socket. Each takes a drawn while to its worker, in order; what a worker says is read at once, and what
it said before it died is read before the end of file, which comes a drawn while after the death.
"""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import trio

from relay.runtime.child import Child
from relay.runtime.control import ControlChannel
from relay.runtime.frames import Begun, Control, Drain, Heartbeat, Ready, Start, WorkerDown, WorkerUp, decode_control, pack

if TYPE_CHECKING:
    from relay.simulation.life import Life
    from relay.simulation.world import World


class SimulatedChild(Child):
    """`life`: None in a spare, and until it has loaded its `Start`."""

    def __init__(self, world: "World", pid: int) -> None:
        self.world, self.pid = world, pid
        self.life: Life | None = None
        self.is_stuck = False  # before it has a life
        self.channel = SimulatedChannel(self)
        self.control = self.channel
        self._ended, self._died, self._is_killed = "", trio.Event(), False

    def is_alive(self) -> bool:
        return not self._ended

    def close(self) -> None:
        """Nothing of it is held."""

    def kill(self) -> None:
        """SIGKILL, which takes effect a while later; then it does nothing any more."""
        if not self._is_killed:
            self._is_killed = True
            self.world.agenda.after(self._while(), self._is_gone)

    def _is_gone(self) -> None:
        if self.life is not None:
            self.life.die("SIGKILL")
        else:
            self.ends("SIGKILL")

    def _while(self) -> float:
        return self.world.scenario.pace.detect_s * self.world.draw_of("child").random()

    async def died(self) -> None:
        await self._died.wait()

    async def fence(self) -> str:
        """See `Child.fence`."""
        with trio.CancelScope(shield=True):
            self.kill()
            with trio.move_on_after(2 * self.world.scenario.pace.detect_s):  # at the end of the world nobody else comes to tell
                await self._died.wait()
            self._is_gone()
            self._is_seen()
        return self._ended

    def scheduled_ns(self) -> tuple[int, int]:
        """Cores are no matter here."""
        return 0, 0

    def is_stopped(self) -> bool:
        """A life that stands still is silent; one that loads does not stand still here."""
        return False

    def ends(self, how: str) -> None:
        """The process is over. `how`: as `Child.fence` says it."""
        if not self._ended:
            self._ended = how
            self.world.agenda.after(self._while(), self._is_seen)

    def _is_seen(self) -> None:
        self._died.set()
        self.channel.end()

    # --- its part of the control protocol

    def obey(self, frame: Control) -> None:
        """What `relay.runtime.host` does with it."""
        root = self.world.supervisor
        if self.is_stuck:
            return
        match frame:
            case Start():
                self.say(Begun())
                root.load(self, frame)
            case WorkerUp():
                self._then(lambda life: life.hear_up(root.life(frame.worker, frame.epoch)))
            case WorkerDown():
                self._then(lambda life: life.hear_down(frame, root.life(frame.worker, frame.epoch)))
            case Drain():
                self._then(lambda life: life.spawn(partial(life.drain, at_once=frame.at_once)))

    async def beat(self) -> None:
        """As long as it lives and runs."""
        assert self.life is not None
        while True:
            await self.life.runs()
            steps, step_age_s = self.life.host.progress() if self.life.compute is not None else (0, 0.0)
            self.say(Heartbeat(steps=steps, step_age_s=step_age_s))
            await trio.sleep(self.world.scenario.runtime.heartbeat_s)

    def say(self, frame: Control) -> None:
        if not self._ended:
            self.channel.arrived(decode_control(pack(frame)[4:]))

    def _then(self, do: "Callable[[Life], None]") -> None:
        if self.life is not None:
            self.life.when_running(partial(do, self.life))


class SimulatedChannel(ControlChannel):
    """The supervisor's end."""

    def __init__(self, child: SimulatedChild) -> None:
        self._child = child
        self._draw = child.world.draw_of("control")
        self._frames: deque[Control] = deque()
        self._news, self._is_over = trio.Event(), False
        self._told_until = 0.0  # when the last frame on its way to the worker arrives

    async def send(self, packed: bytes, fds: tuple[int, ...] = ()) -> None:
        """See `ControlChannel.send`."""
        await trio.lowlevel.checkpoint()
        if self._is_over:
            raise trio.BrokenResourceError
        frame = decode_control(packed[4:])
        self._child.world.supervisor.tells(self._child, frame)
        agenda, told_s = self._child.world.agenda, self._child.world.scenario.pace.told_s
        self._told_until = max(self._told_until, trio.current_time() + told_s * self._draw.random())
        agenda.at(self._told_until, lambda: self._child.obey(frame))

    async def receive(self) -> tuple[Control, dict[str, int]] | None:
        """See `ControlChannel.receive`."""
        await trio.lowlevel.checkpoint()
        while not self._frames and not self._is_over:
            self._news = trio.Event()
            await self._news.wait()
        if not self._frames:
            return None
        frame = self._frames.popleft()
        if isinstance(frame, Ready):
            assert self._child.life is not None
            self._child.world.supervisor.hears_ready(self._child.life)
        return frame, {}

    def arrived(self, frame: Control) -> None:
        self._frames.append(frame)
        self._news.set()

    def end(self) -> None:
        """End of file, behind what has arrived."""
        self._is_over = True
        self._news.set()

    def close(self) -> None:
        """Nothing of it is held."""
