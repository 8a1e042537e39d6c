"""One HTTP request and its answer: its IDs, its ledger, its body, and the only place that writes to its client."""

import math
import re
import time
from collections.abc import Awaitable, Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import structlog
import trio

from relay.auth.caller import ANYONE, Caller
from relay.clock import now_ns
from relay.errors import BodyTooLarge, ClientGone, DeadlineExceeded, InvalidRequest, RequestError, RequestTimeout
from relay.http.body_budget import BodyBudget
from relay.http.content import check_json
from relay.ledger.ledger import Ledger
from relay.ledger.spans import Span
from relay.messages import Decision
from relay.openai.error import error_body, error_headers

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_CLIENT_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_SECRET = re.compile(rb"[A-Za-z0-9._:-]{16,128}")
_PART_BYTES = 256 << 10
_SECONDS = re.compile(r"\d{1,6}(\.\d{1,6})?")
_LONGEST_S = 86400
_SHOWN_PATH = 256
_SSE_HEADERS = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))

log = structlog.get_logger()


class Exchange:
    """`request_id` is ours and unique; `public_id` is what the client sees: its own `X-Request-ID` where that is well formed.

    What the endpoints leave here is what metrics, log line and ledger record say of the request.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, request_id: str, bodies: BodyBudget) -> None:
        self._bodies, self._n_body = bodies, 0
        self.scope, self.receive, self._send = scope, receive, send
        self.request_id = request_id
        self.public_id = _client_id(scope) or request_id
        self.answer_id = request_id  # in the answer's own ID; of a resumed one, the request's that began it
        self.created = int(time.time())
        self.ledger = Ledger(now_ns())
        self.route = scope["path"][:_SHOWN_PATH]
        self.caller, self.has_entered = ANYONE, False
        self.headers: dict[str, str] = {}  # of the answer, beside those that its kind asks for
        self.is_metered = False  # a limit of its key counts it
        self.status = 0
        self.ending = False  # the last byte is being written, or was
        self.complete = False  # it was: what happens now is too late to change the answer
        self.over = trio.Event()  # the ledger is complete
        self.error: RequestError | None = None
        self.deadline_ns = 0  # on the host's monotonic clock; 0 for none
        self.n_prompt = self.n_generated = self.n_cached = 0
        self.attempts = 0
        self.exact = True
        self.decisions: list[Decision] = []
        self.finish_reasons: list[str] = []
        self.token_ns: list[list[int]] = []  # of each choice, when its tokens came
        self.log = log.bind(request_id=request_id)
        if self.public_id != request_id:
            self.log = self.log.bind(client_request_id=self.public_id)

    def header(self, name: bytes) -> bytes:
        """The first of that name, or nothing."""
        return next((value for each, value in self.scope["headers"] if each == name), b"")

    def timeout_s(self) -> float:
        """What the client allows the whole request, by X-Request-Timeout; infinite if it says nothing. Raises InvalidRequest."""
        text = self.header(b"x-request-timeout").decode("latin-1")
        if not text:
            return math.inf
        if not _SECONDS.fullmatch(text) or not 0 < float(text) <= _LONGEST_S:
            raise InvalidRequest(
                f"X-Request-Timeout is `{text[:32]}`; expected seconds above 0 and up to {_LONGEST_S}", param="X-Request-Timeout"
            )
        self.deadline_ns = self.ledger.start_ns + int(float(text) * 1e9)
        return float(text)

    def time_left_s(self) -> float:
        return max(0.0, (self.deadline_ns - now_ns()) / 1e9) if self.deadline_ns else math.inf

    @contextmanager
    def in_time(self) -> Iterator[None]:
        """What is done within ends with the time that the client gave its request, from its first byte on. Raises DeadlineExceeded."""
        with trio.move_on_after(self.time_left_s()) as limit:
            yield
        if limit.cancelled_caught:
            raise self.too_late()

    def too_late(self) -> DeadlineExceeded:
        return DeadlineExceeded("the time that X-Request-Timeout gave the request was over before it was finished")

    def resume_secret(self) -> str | None:
        """None if its stream is not to outlive its connection; else what the client chose to prove later that it is its own, or nothing.

        Raises InvalidRequest.
        """
        value = self.header(b"x-relay-resume")
        if value.lower() in (b"", b"false", b"0", b"no"):
            return None
        if value.lower() in (b"true", b"1", b"yes"):
            return ""
        if not _SECRET.fullmatch(value):
            raise InvalidRequest(
                "X-Relay-Resume is neither `true` nor a secret of 16 to 128 letters, digits and . _ : -", param="X-Relay-Resume"
            )
        return value.decode("ascii")

    def continues(self, request_id: str, public_id: str, created: int, deadline_ns: int) -> None:
        """It goes on with the answer that another request began."""
        self.answer_id, self.public_id, self.created, self.deadline_ns = request_id, public_id, created, deadline_ns
        self.log = self.log.bind(continues=request_id)

    @property
    def started(self) -> bool:
        return self.status != 0

    def enter(self, caller: Caller) -> None:
        """It is known whose request it is."""
        self.caller, self.has_entered = caller, True
        if caller.name is not None:
            self.log = self.log.bind(key=caller.name)

    async def read_body(self, max_bytes: int, within_s: float) -> bytes:
        """The whole body; call `release_body` when it is no longer needed.

        Raises UnsupportedMediaType; BodyTooLarge at the first byte over the cap, RequestTimeout, ClientGone; what BodyBudget.take raises.
        """
        check_json(self.scope["headers"])
        length = dict(self.scope["headers"]).get(b"content-length", b"")
        if length.isdigit() and int(length) > max_bytes:
            raise BodyTooLarge(f"the body has {int(length)} bytes; the limit is {max_bytes}")
        body = bytearray()
        with trio.move_on_after(within_s):
            while True:
                message = await self.receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone("the client left while it sent its body")
                part: bytes = message.get("body", b"")
                if len(body) + len(part) > max_bytes:
                    raise BodyTooLarge(f"the body has more than {max_bytes} bytes, which is the limit")
                self._bodies.take(self.caller, len(part))
                self._n_body += len(part)
                body += part
                if not message.get("more_body", False):
                    self.ledger.close(Span.GATEWAY_BODY, now_ns())
                    return bytes(body)
        raise RequestTimeout(f"the body was not there within {within_s:g} s")

    def release_body(self) -> None:
        """Nobody holds it any more. Idempotent."""
        self._bodies.give_back(self.caller, self._n_body)
        self._n_body = 0

    async def until_disconnect(self) -> None:
        """Return when the client has gone."""
        while (await self.receive())["type"] != "http.disconnect":
            pass

    async def respond(
        self, status: int, body: bytes, *, content_type: bytes = b"application/json", headers: dict[str, str] | None = None
    ) -> None:
        """A whole answer."""
        extra = [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]
        await self._start(status, [(b"content-type", content_type), (b"content-length", b"%d" % len(body)), *extra])
        await self._write(body, more=False)

    async def respond_in_parts(self, status: int, parts: Sequence[bytes]) -> None:
        """A whole answer, JSON, which may be too large to go through the layers below in one piece."""
        n_bytes = sum(map(len, parts))
        await self._start(status, [(b"content-type", b"application/json"), (b"content-length", b"%d" % n_bytes)])
        left, waiting = n_bytes, bytearray()
        for part in parts:
            for start in range(0, len(part), _PART_BYTES):
                waiting += part[start : start + _PART_BYTES]
                if len(waiting) >= min(_PART_BYTES, left):
                    left -= len(waiting)
                    await self._write(bytes(waiting), more=left > 0)
                    waiting.clear()

    async def refuse(self, error: RequestError) -> None:
        """An answer that is an error."""
        self.error = error
        headers = error_headers(error)
        if error.status in (413, 505):  # what follows on the connection is no request
            headers["Connection"] = "close"
        await self.respond(error.status, error_body(error, self.public_id), headers=headers)

    async def start_stream(self) -> None:
        """The headers of a stream of server-sent events."""
        await self._start(200, list(_SSE_HEADERS))

    async def write_event(self, data: bytes) -> None:
        """One or more whole events."""
        await self._write(data, more=True)

    async def write_comment(self, data: bytes) -> None:
        """Between events, while the request waits for something else: not part of its time."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end_stream(self, last: bytes) -> None:
        """The last events, and the end."""
        await self._write(last, more=False)

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.status = status
        headers += [(name.encode(), value.encode()) for name, value in self.headers.items()]
        headers.append((b"x-request-id", self.public_id.encode()))
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def _write(self, data: bytes, *, more: bool) -> None:
        self.ledger.close(Span.OUT_DETOKENIZE, now_ns())
        self.ledger.first_byte()
        self.ending = not more
        with trio.CancelScope(shield=self.ending):  # the end is sent whole or not at all, by the socket's own time limit
            await self._send({"type": "http.response.body", "body": data, "more_body": more})
        self.complete = self.ending
        self.ledger.close(Span.OUT_WRITE_BLOCKED, now_ns())


def _client_id(scope: Scope) -> str | None:
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            return value.decode("ascii") if _CLIENT_ID.fullmatch(value) else None
    return None
