"""What a decode worker remembers of resumable attempts: every token it gave, so that another gateway can be told everything.

A log is kept while its attempt runs with a reader, and for `grace_s` after its reader has gone or its attempt has ended. All logs of a
worker together hold `max_bytes`: an attempt for which there is no room is refused before it begins, and what grows beyond it takes the room
of whoever holds most, ended ones first. Who loses his log goes on, and cannot be resumed.
"""

from array import array
from collections import Counter, OrderedDict

import msgspec

from relay.clock import now_ns
from relay.messages import Admit, FinishReason, Key, Logprobs, Resumable, Row

MAX_LOGS = 4096  # ended or orphaned; the oldest go first
_LOG_BYTES, _PIECE_BYTES = 1024, 96  # of an empty log, and of each piece of packed log probabilities, beside what is in them
_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(tuple[Logprobs, ...]).decode


class _Packed:
    """Log probabilities as they travel: a fifth of what they take as objects, and their size is known."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self.n = self.n_bytes = 0

    def add(self, logprobs: tuple[Logprobs, ...]) -> None:
        if logprobs:
            piece = _pack(logprobs)
            self._pieces.append(piece)
            self.n += len(logprobs)
            self.n_bytes += len(piece) + _PIECE_BYTES

    def all(self) -> tuple[Logprobs, ...]:
        return tuple(each for piece in self._pieces for each in _unpack(piece))


class TokenLog:
    """Of one attempt. `displaced` says why it ended without finishing, if it did."""

    def __init__(self, resumable: Resumable, ids: tuple[int, ...], logprobs: tuple[Logprobs, ...]) -> None:
        """`ids` and `logprobs` are of earlier attempts."""
        self.resumable = resumable
        self._ids, self._logprobs, self._scores = array("i", ids), _Packed(), _Packed()
        self._logprobs.add(logprobs)
        self.n_cached = 0
        self.finish: FinishReason | None = None
        self.displaced = ""
        self.over = False
        self.is_kept = True
        self.unread = False  # its reader went before it ended
        self.orphan_since_ns = 0

    def __len__(self) -> int:
        """Tokens."""
        return len(self._ids)

    @property
    def n_bytes(self) -> int:
        return (
            _LOG_BYTES + len(self.resumable.envelope) + len(self._ids) * self._ids.itemsize + self._logprobs.n_bytes + self._scores.n_bytes
        )

    def add(self, row: Row) -> None:
        """Rows come in order, each token once."""
        if row.first == 0:
            self.n_cached = row.n_cached
        if self._scores.n == 0:  # a retry tells them again
            self._scores.add(row.prompt_logprobs)
        self._ids.extend(row.ids)
        self._logprobs.add(row.logprobs)
        if row.finish:
            self.finish = row.finish

    def row(self, key: Key) -> Row:
        """All of it."""
        return Row(*key, 0, tuple(self._ids), (), self.finish or "", self._logprobs.all(), self.n_cached, self._scores.all())

    def empty(self) -> None:
        """It is kept no more; its attempt may still run."""
        self.is_kept = False
        self._ids, self._logprobs, self._scores = array("i"), _Packed(), _Packed()

    def orphaned(self) -> None:
        """Nobody reads it from now on."""
        self.unread = True
        self._rests()

    def adopted(self) -> None:
        self.unread = False
        self.orphan_since_ns = now_ns() if self.over else 0

    def end(self) -> None:
        """Nothing comes to it any more, however its attempt ended."""
        self.over = True
        self._rests()

    def _rests(self) -> None:
        self.orphan_since_ns = self.orphan_since_ns or now_ns()


def _request(key: Key) -> str:
    """The request that this is a choice of."""
    return key[0].split("/")[0]


class TokenLogs:
    """All logs of one decode worker."""

    def __init__(self, grace_s: float, max_bytes: int = 1 << 28) -> None:
        self._grace_ns, self._max_bytes = int(grace_s * 1e9), max_bytes
        self._logs: OrderedDict[Key, TokenLog] = OrderedDict()
        self._held: Counter[str] = Counter()  # bytes, by owner

    def __len__(self) -> int:
        return len(self._logs)

    @property
    def n_bytes(self) -> int:
        return self._held.total()

    def open(self, admit: Admit) -> TokenLog | None:
        """Of an attempt that is resumable; None if there is no room for it."""
        assert admit.resumable is not None
        log = TokenLog(admit.resumable, admit.tokens[admit.n_prompt :], admit.logprobs)
        while self.n_bytes + log.n_bytes > self._max_bytes:
            if not self._give_up_one(ended=True):
                return None
        self._logs[admit.request_id, admit.attempt] = log
        self._held[log.resumable.owner] += log.n_bytes
        return log

    def add(self, log: TokenLog, row: Row) -> None:
        """Remember a row; of one that is kept no more, nothing."""
        if not log.is_kept:
            return
        before = log.n_bytes
        log.add(row)
        self._held[log.resumable.owner] += log.n_bytes - before
        while self.n_bytes > self._max_bytes and (self._give_up_one(ended=True) or self._give_up_one(ended=False)):
            pass

    def get(self, key: Key) -> TokenLog | None:
        return self._logs.get(key)

    def unread(self) -> bool:
        """Whether there is one that nobody has come for since its reader went."""
        return any(log.unread for log in self._logs.values())

    def find(self, name: str, owner: str = "", secret: str = "") -> list[tuple[Key, bytes]]:
        """The newest attempt of each choice of the newest request with this name, with its envelope where it has one.

        By our own ID, which nobody can guess, or by the client's, which anybody could: that counts for its own key only, or, where the
        request had none, for who knows the secret that the client chose.
        """
        mine = {
            key: log.resumable
            for key, log in self._logs.items()
            if log.resumable.owner == owner
            and (name == _request(key) or (name == log.resumable.public_id and (owner != "" or secret == log.resumable.secret != "")))
        }
        newest = max(((resumable.created, _request(key)) for key, resumable in mine.items()), default=(0, ""))
        found: dict[str, tuple[Key, bytes]] = {}
        for key, resumable in mine.items():
            if _request(key) == newest[1] and (key[0] not in found or found[key[0]][0][1] < key[1]):
                found[key[0]] = key, resumable.envelope
        return list(found.values())

    def expired(self) -> list[Key]:
        """Forget what nobody came for in time; returns the keys, some of which may still run. The choices of one request go together: one
        may have ended long before a client needs it again, with the others."""
        now = now_ns()
        since: dict[str, int] = {}
        for key, log in self._logs.items():
            request = _request(key)
            since[request] = max(since.get(request, 0), log.orphan_since_ns or now)
        gone = [key for key in self._logs if now - since[_request(key)] > self._grace_ns]
        orphans = [key for key, log in self._logs.items() if log.orphan_since_ns]
        gone += [key for key in orphans[: max(0, len(orphans) - MAX_LOGS)] if key not in gone]
        for key in gone:
            self._forget(key)
        return gone

    def _give_up_one(self, *, ended: bool) -> bool:
        """Of who holds most: the oldest that has ended, or of those that run the largest."""
        for owner, _ in self._held.most_common():
            of_owner = [key for key, log in self._logs.items() if log.resumable.owner == owner and log.over == ended]
            if of_owner:
                self._forget(of_owner[0] if ended else max(of_owner, key=lambda key: self._logs[key].n_bytes))
                return True
        return False

    def _forget(self, key: Key) -> None:
        log = self._logs.pop(key)
        self._held[log.resumable.owner] -= log.n_bytes
        log.empty()
        if self._held[log.resumable.owner] <= 0:
            del self._held[log.resumable.owner]
