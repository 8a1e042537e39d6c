"""One request over the wire: bytes in; for a stream a `Record` out, for a plain request its status and body.

Whatever the server does is a result and raises nothing.
"""

import msgspec
import trio

from relay.bench.answer import Answer, error_text
from relay.bench.record import Record
from relay.bench.response import ResponseReader
from relay.bench.schedule import Planned
from relay.bench.target import Target
from relay.bench.wire import Connection, Wire


class Exchange:
    """Hears of its connection; `done` is set when nothing more will come. What is no stream of status 200 is kept in `body`."""

    def __init__(self, *, streams: bool) -> None:
        self.response = ResponseReader()
        self.answer = Answer()
        self.body = b""
        self.lost: str | None = None  # why the connection ended before the response did
        self.done = trio.Event()
        self.end_s = 0.0
        self._streams = streams

    def on_data(self, data: bytes, now: float) -> None:
        response = self.response
        body = response.feed(data)
        if body:
            if self._streams and response.status == 200:
                self.answer.feed(body, now)
            else:
                self.body += body
        if response.complete or response.problem:
            self._end(now)

    def on_lost(self, why: str, now: float) -> None:
        self.response.end()
        if not self.response.complete:
            self.lost = why or "the server closed the connection before its answer ended"
        self._end(now)

    @property
    def silent(self) -> bool:
        """Not a byte came: what a connection does that the server had closed while it was idle."""
        return self.lost is not None and not self.response.status

    def failure(self) -> tuple[str, str] | None:
        """Kind and words, None for ok."""
        response, answer = self.response, self.answer
        if response.problem:
            return "malformed", response.problem
        if response.status not in (0, 200):
            return f"http_{response.status}", _words(self.body)
        if self._streams and response.status == 200:
            if answer.error:
                return "error_event", answer.error
            if answer.problem:
                return "malformed", answer.problem
            if answer.done:
                return None
            return "cut", self.lost or "the stream ended without [DONE]"
        return ("cut", self.lost) if self.lost is not None else None

    def _end(self, now: float) -> None:
        self.end_s = self.answer.done_s or now
        self.done.set()


class Client:
    """`timeout_s` is of a whole request."""

    def __init__(self, wire: Wire, target: Target, *, timeout_s: float) -> None:
        self._wire, self._target, self._timeout_s = wire, target, timeout_s

    async def ask(self, path: str, body: bytes, planned: Planned, start: float, epoch: float) -> Record:
        """Stream an answer. `start` is when it was meant to begin and `epoch` the zero of the record, both on trio's clock."""
        sent = trio.current_time()
        exchange, failure = await self._exchange(self._target.request("POST", path, body), streams=True)
        answer = exchange.answer
        return Record(
            index=planned.index,
            start_s=start - epoch,
            sent_s=sent - epoch,
            end_s=(exchange.end_s or trio.current_time()) - epoch,
            asked_prompt_tokens=planned.prompt_tokens,
            asked_output_tokens=planned.output_tokens,
            chunk_s=answer.since(epoch),
            prompt_tokens=answer.usage.prompt_tokens,
            completion_tokens=answer.usage.completion_tokens,
            cached_tokens=answer.cached_tokens,
            finish_reason=answer.finish_reason,
            failure=failure[0] if failure else None,
            message=failure[1] if failure else "",
            request_id=exchange.response.headers.get(b"x-request-id", b"").decode("latin-1") or None,
        )

    async def fetch(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes, str]:
        """Status (0 for none), body, and what went wrong if anything did."""
        exchange, failure = await self._exchange(self._target.request(method, path, body), streams=False)
        return exchange.response.status, exchange.body, ": ".join(failure) if failure else ""

    async def _exchange(self, request: bytes, *, streams: bool) -> tuple[Exchange, tuple[str, str] | None]:
        exchange = Exchange(streams=streams)
        with trio.move_on_after(self._timeout_s):
            try:
                connection = await self._wire.connection()
                reused = connection.used
                await self._converse(connection, request, exchange)
                if exchange.silent and reused:  # it was closed while it idled, which is nobody's failure
                    exchange = Exchange(streams=streams)
                    await self._converse(await self._wire.connection(fresh=True), request, exchange)
            except OSError as error:
                return exchange, ("connect", error.strerror or str(error))
            return exchange, exchange.failure()
        if exchange.answer.done or exchange.done.is_set():  # answered, though the response stays open or our body was never read
            exchange.end_s = exchange.answer.done_s or exchange.end_s
            return exchange, exchange.failure()
        return exchange, ("timeout", f"not answered within {self._timeout_s:g} s")

    async def _converse(self, connection: Connection, request: bytes, exchange: Exchange) -> None:
        connection.sink = exchange
        sent = False
        try:
            await connection.send(request)
            sent = True
            await exchange.done.wait()
        except (BrokenPipeError, ConnectionResetError, trio.ClosedResourceError):
            await exchange.done.wait()  # it closed while we sent, perhaps after an answer: what was read tells
        finally:
            if sent and exchange.response.complete and exchange.response.keep_alive:
                self._wire.release(connection)
            else:
                connection.close()


def _words(body: bytes) -> str:
    try:
        parsed = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return body.decode("utf-8", "replace")[:300]
    return error_text(parsed.get("error", parsed) if isinstance(parsed, dict) else parsed)
