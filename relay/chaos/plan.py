"""What is done to a server while it is under load: each plan strikes again and again, at random tokens and at named points."""

import random
import signal
import time
from collections.abc import Callable

from relay.chaos.server import ServerUnderTest
from relay.errors import StartError

Strike = Callable[[ServerUnderTest, random.Random], str]  # returns the worker that was struck

_DECODE_POINTS = ("message:Expect", "message:Prefilled", "message:Cancel", "step", "layer")
_PREFILL_POINTS = ("message:Prefill", "message:Revoke", "step", "layer")
_ROUTER_POINTS = ("message:Admit", "message:Left", "message:Announced")


def _pick(server: ServerUnderTest, draw: random.Random, role: str) -> str:
    """A worker that has this role for its own: an aggregated one has both."""
    names = sorted(name for name in server.workers() if name.startswith(role)) or sorted(
        name for name in server.workers() if not name.startswith(("gateway", "router"))
    )
    return draw.choice(names)


def _kill(role: str, points: tuple[str, ...]) -> Strike:
    def strike(server: ServerUnderTest, draw: random.Random) -> str:
        worker = _pick(server, draw, role)
        if points and draw.random() < 0.5:
            server.arm(worker, draw.choice(points), "kill", after=draw.randint(1, 3))
        else:
            server.kill(worker)
        return worker

    return strike


def _kill_9(server: ServerUnderTest, draw: random.Random) -> str:
    """As the kernel or an operator would, which no step board hears of before; every other time two, the second while the first's requests
    are under suspicion: of another worker, or of the same one's next life."""
    names = sorted(name for name in server.workers() if not name.startswith("gateway"))
    first = draw.choice(names)
    server.kill(first, announced=False)
    if draw.random() < 0.5:
        time.sleep(draw.uniform(0.05, 1.2))
        server.kill(draw.choice(names), announced=False)
    return first


def _stop(role: str) -> Strike:
    def strike(server: ServerUnderTest, draw: random.Random) -> str:
        worker = _pick(server, draw, role)
        server.kill(worker, signal.SIGSTOP)
        return worker

    return strike


def _cut(server: ServerUnderTest, draw: random.Random) -> str:
    worker = draw.choice([name for name in sorted(server.workers()) if not name.startswith("gateway")])
    server.arm(worker, "now", "cut", seconds=draw.choice((0.05, 0.3, 1.0)))
    return worker


def _corrupt(server: ServerUnderTest, draw: random.Random) -> str:
    worker = _pick(server, draw, "prefill")
    server.arm(worker, "now", "corrupt")
    return worker


PLANS: dict[str, Strike] = {
    "kill-decode": _kill("decode", _DECODE_POINTS),
    "kill-prefill": _kill("prefill", _PREFILL_POINTS),
    "kill-router": _kill("router", _ROUTER_POINTS),
    "kill-gateway": _kill("gateway", ()),
    "kill-9": _kill_9,
    "stop-decode": _stop("decode"),
    "stop-prefill": _stop("prefill"),
    "cut-link": _cut,
    "corrupt-push": _corrupt,
}


def parse_plans(text: str) -> list[str]:
    """Names joined by commas. Raises StartError."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in PLANS and name != "none":
            raise StartError(f"--plan names `{name}`; expected some of none, {', '.join(PLANS)}")
    if not names:
        raise StartError("--plan is empty; name at least one, such as kill-decode")
    return names
