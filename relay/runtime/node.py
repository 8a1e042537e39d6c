"""One worker's switchboard: local mailboxes, lanes and links to the others, who watches whom. Synchronous but for `send`.

In: frames from links, `up` and `down` on the supervisor's word. Out: frames to links, `Up` and `Down` to local actors.

Laws. `Down(address)` is the last message of that address: what a link delivers for a dead life is dropped. Within one link, order is kept.
The supervisor tells each worker of a new life on that worker's own road, so a peer's message can name an address a moment before we hear
of it. With `hold_early` such an address (an epoch above every one known for its actor) counts as alive: mail is held, monitors wait, until
the supervisor's word comes. Taking it for dead would be worse than slow: leases end with a writer's death, and deaths are told on.

What no frame can hold is not sent, and raises nothing: whoever sent it is told by `Oversized`, one for each attempt that it was about. That
is the last net, for actors send what is large in parts; without it one request would end its worker, and the next one to take it.
"""

from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Protocol

import structlog
import trio

from relay.errors import FrameTooLarge
from relay.messages import (
    Address,
    Admit,
    Cancel,
    Detach,
    Down,
    Expect,
    Key,
    Message,
    Oversized,
    Prefill,
    Prefilled,
    Resume,
    Returned,
    Scores,
    Settle,
    Spent,
    Tokens,
    Up,
)
from relay.runtime.mailbox import Lane, Life, Mailbox, Sent

# What frees room must not wait for room. Resume is among it to keep its place: behind the Detach of the reader before, before its own.
OUTSIDE_LANES: tuple[type, ...] = (Up, Down, Oversized, Cancel, Detach, Resume, Spent, Returned, Settle)
_Words = tuple[str, tuple[str, ...], bool]  # of a death: reason, suspects, lone; as in `Down`
_UNKNOWN: _Words = ("not alive", (), False)
_log = structlog.get_logger()


class Outlet(Protocol):
    """What a node needs of a link to one life: ordered, never blocking. Raises FrameTooLarge for what no frame can hold."""

    def deliver(self, to: Address, body: Message) -> None: ...
    def credit(self, to: Address, n: int) -> None: ...


class Node:
    """`outside` are the classes that cost no credit; nodes that talk to each other must agree on them and on `window`."""

    def __init__(
        self, worker: str, epoch: int, *, window: int = 4096, outside: tuple[type, ...] = OUTSIDE_LANES, hold_early: bool = False
    ) -> None:
        self.worker, self.epoch = worker, epoch
        self._window, self._outside, self._hold_early = window, outside, hold_early
        self._boxes: dict[str, Mailbox] = {}
        self._lanes: dict[Address, Lane] = {}
        self._links: dict[Life, Outlet] = {}  # by life: a worker's old and new epoch may both be known for a while
        self._home: dict[Address, str] = {}
        self._upped: dict[Address, None] = {}
        self._highest: dict[str, int] = {}  # actor to the highest epoch heard of
        self._early: dict[Address, list[Sent]] = {}
        self._watchers: defaultdict[Address, dict[str, None]] = defaultdict(dict)  # dicts, not sets: their order is that of insertion
        self._untaken: dict[tuple[str, Address], None] = {}  # a Down that lies in a mailbox
        self.on_taken: Callable[[Address, Message], None] | None = None  # chaos tests look at each message as its actor takes it
        self._owed: Counter[tuple[Life, Address]] = Counter()
        self._deaths: dict[str, tuple[int, _Words]] = {}  # of each actor the last one that we were told of

    # --- for actors, by way of Context

    def open(self, actor: str) -> "Context":
        """Give a local actor its mailbox; it is told of everyone who is up already."""
        address = Address(actor, self.epoch)
        box = self._boxes[actor] = Mailbox(lambda origin, message: self._taken(address, origin, message))
        self._home[address], self._highest[actor] = self.worker, self.epoch
        for other in self._upped:
            box.put(None, Up(address=other))
        return Context(self, address, box)

    def is_alive(self, address: Address) -> bool:
        return address in self._home or self._is_early(address)

    def is_local(self, address: Address) -> bool:
        return self._home.get(address) == self.worker

    def post(self, to: Address, message: Message, sender: str = "") -> None:
        """Send without waiting, as the local actor `sender`. Without credit it waits here, before whatever comes later: for messages whose
        number the protocol bounds.

        Mail for the dead is dropped: `Down` is how one learns.
        """
        if self.is_alive(to) and not isinstance(message, self._outside) and self._lane(to).free == 0:
            self._lane(to).put_off((sender, message))
        else:
            self.offer(to, message, sender)

    def offer(self, to: Address, message: Message, sender: str = "") -> None:
        """Send now or not at all. Raises LaneFull: refuse, or merge with what comes later."""
        if not self.is_alive(to):
            return
        paid = not isinstance(message, self._outside)
        if paid:
            self._lane(to).take()
        if not self._pass_on(to, (sender, message)) and paid:
            self._give(to, 1)

    async def send(self, to: Address, message: Message, sender: str = "") -> None:
        """Send, waiting for room. Only for edges (a stream to a client, admission): two actors that wait on each other never wake."""
        if self.is_alive(to) and not isinstance(message, self._outside):
            await self._lane(to).wait()
        else:
            await trio.lowlevel.checkpoint()
        self.offer(to, message, sender)

    def monitor(self, watcher: str, target: Address) -> None:
        """Put one `Down(target)` into the watcher's mailbox when it dies, at once if it is dead. Calls until that is taken share it."""
        if self.is_alive(target):
            self._watchers[target][watcher] = None
        else:
            self._tell_down(watcher, target, *self._last_words(target))

    # --- for the host: the supervisor's word

    def up(self, worker: str, epoch: int, actors: tuple[str, ...], link: Outlet | None = None) -> None:
        """A worker is ready. `link` may still be connecting: what is sent waits in it. None for our own worker."""
        if link is not None:
            self._links[worker, epoch] = link
        for actor in actors:
            address = Address(actor, epoch)
            self._home[address], self._upped[address] = worker, None
            self._bury_early(actor, epoch - 1)
            self._highest[actor] = max(epoch, self._highest.get(actor, 0))
            for box in self._boxes.values():
                box.put(None, Up(address=address))
            for sent in self._early.pop(address, ()):
                self._pass_on(address, sent)

    def down(
        self, worker: str, epoch: int, reason: str, actors: tuple[str, ...] = (), *, suspects: tuple[str, ...] = (), lone: bool = False
    ) -> None:
        """A worker is reaped and its link read to the end: tell the watchers, last. `actors`: its own, where we never heard it was up."""
        self._links.pop((worker, epoch), None)
        gone = [a for a, home in self._home.items() if home == worker and a.epoch == epoch]
        for actor in (*actors, *(address.actor for address in gone)):
            self._deaths[actor] = epoch, (reason, suspects, lone)
        for address in gone:
            del self._home[address]
            self._upped.pop(address, None)
            self._forget(address, reason, suspects, lone)
        for actor in actors:
            self._bury_early(actor, epoch)
            self._highest[actor] = max(epoch, self._highest.get(actor, 0))
        for owed in [key for key in self._owed if key[0] == (worker, epoch)]:
            del self._owed[owed]

    def close(self) -> None:
        """End every local actor's iteration."""
        for box in self._boxes.values():
            box.close()

    # --- for links

    def delivered(self, origin: Life, to: Address, body: Message, *, at_once: bool = False) -> None:
        """A message from the link to `origin`; of no effect once that life is down. at_once: see `Mailbox.put`."""
        if origin in self._links and to.epoch == self.epoch and to.actor in self._boxes:
            self._boxes[to.actor].put(None if isinstance(body, self._outside) else origin, body, at_once=at_once)

    def credited(self, to: Address, n: int) -> None:
        if to in self._lanes:
            self._give(to, n)

    # --- inside

    def _give(self, to: Address, n: int) -> None:
        for sent in self._lane(to).give(n):
            if not self._pass_on(to, sent):
                self._give(to, 1)

    def _is_early(self, address: Address) -> bool:
        return self._hold_early and address.epoch > self._highest.get(address.actor, 0)

    def _lane(self, to: Address) -> Lane:
        if to not in self._lanes:
            self._lanes[to] = Lane(to, self._window)
        return self._lanes[to]

    def _pass_on(self, to: Address, sent: Sent) -> bool:
        """Whether it is on its way; what is not is told to its sender."""
        home, (sender, message) = self._home.get(to), sent
        if home is None:
            self._early.setdefault(to, []).append(sent)
        elif home == self.worker:
            self._boxes[to.actor].put(None if isinstance(message, self._outside) else (home, to.epoch), message)
        else:
            try:
                self._links[home, to.epoch].deliver(to, message)
            except FrameTooLarge as error:
                self._too_large(sender, to, message, str(error))
                return False
        return True

    def _too_large(self, sender: str, to: Address, message: Message, why: str) -> None:
        _log.error("message_too_large", sender=sender, to=str(to), error=why)
        for request_id, attempt in _attempts(message) if sender in self._boxes else ():
            self._boxes[sender].put(None, Oversized(request_id=request_id, attempt=attempt, to=to, reason=why))

    def _taken(self, address: Address, origin: Life | None, message: Message) -> None:
        if self.on_taken is not None:
            self.on_taken(address, message)
        if isinstance(message, Down):
            self._untaken.pop((address.actor, message.address), None)
        if origin == (self.worker, self.epoch):
            self._give(address, 1)
        elif origin is not None and origin in self._links:
            self._owed[origin, address] += 1
            if 2 * self._owed[origin, address] >= self._window:  # by halves: a frame for each message would double the traffic
                self._links[origin].credit(address, self._owed.pop((origin, address)))

    def _last_words(self, address: Address) -> _Words:
        """What we were told of its death, if that was its actor's last one."""
        epoch, words = self._deaths.get(address.actor, (0, _UNKNOWN))
        return words if epoch == address.epoch else _UNKNOWN

    def _bury_early(self, actor: str, epoch: int) -> None:
        """Lives up to `epoch` whose death came before any word of them."""
        waited_for = {**dict.fromkeys(self._early), **dict.fromkeys(self._watchers), **dict.fromkeys(self._lanes)}
        for address in waited_for:
            if address.actor == actor and address.epoch <= epoch and address not in self._home:
                self._forget(address, *self._last_words(address))

    def _forget(self, address: Address, reason: str, suspects: tuple[str, ...] = (), lone: bool = False) -> None:
        self._early.pop(address, None)
        if address in self._lanes:
            self._lanes.pop(address).close()
        for watcher in self._watchers.pop(address, {}):
            self._tell_down(watcher, address, reason, suspects, lone)

    def _tell_down(self, watcher: str, target: Address, reason: str, suspects: tuple[str, ...] = (), lone: bool = False) -> None:
        if (watcher, target) not in self._untaken:
            self._untaken[watcher, target] = None
            self._boxes[watcher].put(None, Down(address=target, reason=reason, suspects=suspects, lone=lone))


def _attempts(message: Message) -> list[Key]:
    """That it is about."""
    match message:
        case Expect():
            return [(message.admit.request_id, message.admit.attempt)]
        case Tokens():
            return [(row.request_id, row.attempt) for row in message.rows]
        case Admit() | Prefill() | Scores() | Prefilled():
            return [(message.request_id, message.attempt)]
        case _:
            return []  # of no attempt, or too small to be too large


class Context:
    """What an actor sees of the world. A simulation overrides `sleep`."""

    def __init__(self, node: Node, address: Address, inbox: Mailbox) -> None:
        self._node, self.address, self.inbox = node, address, inbox
        self.is_alive = node.is_alive
        self.post: Callable[[Address, Message], None] = partial(node.post, sender=address.actor)
        self.offer: Callable[[Address, Message], None] = partial(node.offer, sender=address.actor)
        self.send: Callable[[Address, Message], Awaitable[None]] = partial(node.send, sender=address.actor)

    def is_local(self, address: Address) -> bool:
        """Whether that actor lives in this worker."""
        return self._node.is_local(address)

    def monitor(self, target: Address) -> None:
        """Have `Down(target)` come to the inbox once: when it dies, or at once if it is not alive."""
        self._node.monitor(self.address.actor, target)

    async def sleep(self, seconds: float) -> None:
        await trio.sleep(seconds)
