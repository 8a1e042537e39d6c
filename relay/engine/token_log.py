"""What a decode worker remembers of resumable attempts: every token it gave, so that another gateway can be told everything.

A log is kept while its attempt runs with a reader, and for `grace_s` after its reader has gone or its attempt has ended.
"""

from collections import OrderedDict

from relay.clock import now_ns
from relay.messages import Admit, FinishReason, Key, Logprobs, Resumable, Row

MAX_LOGS = 4096  # ended or orphaned; the oldest go first


class TokenLog:
    """Of one attempt. `displaced` says why it ended without finishing, if it did."""

    def __init__(self, resumable: Resumable, ids: tuple[int, ...], logprobs: tuple[Logprobs, ...]) -> None:
        """`ids` and `logprobs` are of earlier attempts."""
        self.resumable = resumable
        self.ids = list(ids)
        self.logprobs = list(logprobs)
        self.scores: tuple[Logprobs, ...] = ()
        self.n_cached = 0
        self.finish: FinishReason | None = None
        self.displaced = ""
        self.over = False
        self.unread = False  # its reader went before it ended
        self.orphan_since_ns = 0

    def add(self, row: Row) -> None:
        """Rows come in order, each token once."""
        if row.first == 0:
            self.scores, self.n_cached = row.prompt_logprobs, row.n_cached
        self.ids += row.ids
        self.logprobs += row.logprobs
        if row.finish:
            self.finish = row.finish

    def row(self, key: Key) -> Row:
        """All of it."""
        return Row(*key, 0, tuple(self.ids), (), self.finish or "", tuple(self.logprobs), self.n_cached, self.scores)

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

    def __init__(self, grace_s: float) -> None:
        self._grace_ns = int(grace_s * 1e9)
        self._logs: OrderedDict[Key, TokenLog] = OrderedDict()

    def __len__(self) -> int:
        return len(self._logs)

    def open(self, admit: Admit) -> TokenLog:
        """Of an attempt that is resumable."""
        assert admit.resumable is not None
        log = TokenLog(admit.resumable, admit.tokens[admit.n_prompt :], admit.logprobs)
        self._logs[admit.request_id, admit.attempt] = log
        return log

    def get(self, key: Key) -> TokenLog | None:
        return self._logs.get(key)

    def unread(self) -> bool:
        """Whether there is one that nobody has come for since its reader went."""
        return any(log.unread for log in self._logs.values())

    def find(self, name: str) -> list[tuple[Key, bytes]]:
        """The newest attempt of each choice of the request with this name, ours or the client's."""
        found: dict[str, tuple[Key, bytes]] = {}
        for key, log in self._logs.items():
            own = _request(key)
            if name in (own, log.resumable.public_id) and (key[0] not in found or found[key[0]][0][1] < key[1]):
                found[key[0]] = key, log.resumable.envelope
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
            del self._logs[key]
        return gone
