"""What happened in a run: a digest that two equal runs share, and on demand a log to read."""

import hashlib

import msgspec
import trio

from relay.messages import Address, Message

_encode = msgspec.msgpack.Encoder().encode


class Trace:
    """`log` None keeps no lines, which is ten times as fast."""

    def __init__(self, log: list[str] | None = None) -> None:
        self._hash = hashlib.blake2b(digest_size=16)
        self._log = log
        self.n_events = 0

    def note(self, what: str) -> None:
        self.n_events += 1
        self._hash.update(f"{trio.current_time():.9f} {what}\n".encode())
        if self._log is not None:
            self._log.append(f"{trio.current_time():9.6f} {what}")

    def mail(self, verb: str, actor: str, other: Address, message: Message) -> None:
        """`actor` has sent to `other`, or taken from its mailbox."""
        self.n_events += 1
        self._hash.update(f"{trio.current_time():.9f} {verb} {actor} {other}".encode())
        self._hash.update(_encode(message))
        if self._log is not None:
            self._log.append(f"{trio.current_time():9.6f} {actor} {verb} {other} {message}")

    def digest(self) -> str:
        return self._hash.hexdigest()
