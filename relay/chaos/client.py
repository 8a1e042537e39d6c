"""A client that does what a careful one would: reads its stream strictly, resumes it where it may, and asks again where nothing came of an
answer. Blocking; one thread each."""

import http.client
import json
import time
import uuid
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from relay.chaos.requests import Spec

_TIMEOUT_S = 180.0
_RESUME_WITHIN_S = 60.0


@dataclass
class Outcome:
    """What came of one request. texts: by choice. event_s: when each event with text came, on time.monotonic's clock.

    failure: empty, or why it is no whole answer: an HTTP status, the code of an error event, or a broken connection.
    """

    kind: str
    started_s: float
    texts: dict[int, str] = field(default_factory=dict)
    finishes: dict[int, str] = field(default_factory=dict)
    n_tokens: int = 0
    event_s: list[float] = field(default_factory=list)
    request_id: str = ""
    failure: str = ""
    n_resumed: int = 0
    n_asked_again: int = 0
    left: bool = False  # by its own will
    done: bool = False

    @property
    def answer(self) -> tuple[Any, ...]:
        """What must be the same every time."""
        return tuple(sorted(self.texts.items())), tuple(sorted(self.finishes.items())), self.n_tokens

    def longest_gap_ms(self) -> float:
        """Between two events; the wait for the first is not one."""
        return max((1e3 * (b - a) for a, b in zip(self.event_s, self.event_s[1:], strict=False)), default=0.0)


class ChaosClient:
    """`resumable`: gateways may die. Streams are opened so that they outlive their connection, under an ID of the client's own, and gone on
    with until they end; what is not streamed, or was not known to anybody but the dead gateway, is asked again."""

    def __init__(self, url: str, *, resumable: bool) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        self._host, self._port, self._resumable = parts.hostname, parts.port, resumable
        self._last_id = self._next_id = ""
        self._leave_after: int | None = None

    def ask(self, spec: Spec, *, leave_after: int | None = None) -> Outcome:
        """`leave_after`: close the connection after so many events with text."""
        outcome = Outcome(spec.kind, time.monotonic())
        self._leave_after = leave_after
        self._last_id = self._next_id = ""
        headers, secret = {}, {"X-Relay-Resume": str(uuid.uuid4())}
        if self._resumable and spec.streams:
            outcome.request_id = f"chaos-{uuid.uuid4()}"
            headers = {**secret, "X-Request-ID": outcome.request_id}
        self._exchange(outcome, "POST", spec.path, headers, spec)
        give_up = time.monotonic() + _RESUME_WITHIN_S
        while self._resumable and not outcome.left and outcome.failure.startswith("broken") and time.monotonic() < give_up:
            lost = not spec.streams
            if spec.streams:
                self._exchange(
                    outcome, "GET", f"/v1/requests/{outcome.request_id}/stream", {**secret, "Last-Event-ID": self._last_id}, spec
                )
                lost = outcome.failure.endswith(": stream_lost") and not self._last_id
                outcome.n_resumed += not lost and not outcome.failure.startswith("broken")
            if lost:
                self._exchange(outcome, "POST", spec.path, headers, spec)
                outcome.n_asked_again += 1
            if outcome.failure.startswith("broken"):
                time.sleep(0.02)  # nothing tells a client when a server takes connections again
        return outcome

    def _exchange(self, outcome: Outcome, method: str, path: str, headers: dict[str, str], spec: Spec) -> None:
        outcome.failure = ""
        connection = http.client.HTTPConnection(self._host, self._port, timeout=_TIMEOUT_S)
        try:
            body = json.dumps(spec.body) if method == "POST" else None
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            outcome.request_id = outcome.request_id or response.headers["x-request-id"] or ""
            if response.status != 200:
                outcome.failure = f"HTTP {response.status}: {_code(response.read())}"
            elif spec.streams:
                self._read_stream(outcome, response)
            else:
                self._read_whole(outcome, response)
        except (OSError, http.client.HTTPException, ValueError) as error:
            outcome.failure = f"broken connection: {type(error).__name__}"
        finally:
            connection.close()
        if not outcome.failure and not outcome.done and not outcome.left:
            outcome.failure = "broken: the stream ended without [DONE]"

    def _read_stream(self, outcome: Outcome, response: http.client.HTTPResponse) -> None:
        data = b""
        for line in response:
            if line == b"\n":
                self._last_id = self._next_id  # an event counts once its blank line has come
                if data and not self._take(outcome, data):
                    return
                data = b""
            elif line.startswith(b"data: ") and line.endswith(b"\n"):
                data = line[6:-1]
            elif line.startswith(b"id: "):
                self._next_id = line[4:].decode().strip()

    def _take(self, outcome: Outcome, data: bytes) -> bool:
        """Whether the stream goes on."""
        if data == b"[DONE]":
            outcome.done = True
            return False
        event = json.loads(data)
        if "error" in event:
            outcome.failure = f"error event: {event['error']['code']}"
            return False
        for choice in event["choices"]:
            text = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            if text:
                outcome.texts[choice["index"]] = outcome.texts.get(choice["index"], "") + text
                outcome.event_s.append(time.monotonic())
                if len(outcome.event_s) == self._leave_after:
                    outcome.left = True
                    return False
            if choice["finish_reason"]:
                outcome.finishes[choice["index"]] = choice["finish_reason"]
        if event.get("usage"):
            outcome.n_tokens = event["usage"]["completion_tokens"]
        return True

    def _read_whole(self, outcome: Outcome, response: http.client.HTTPResponse) -> None:
        answer = json.loads(response.read())
        for choice in answer["choices"]:
            outcome.texts[choice["index"]] = choice["text"] if "text" in choice else choice["message"]["content"]
            outcome.finishes[choice["index"]] = choice["finish_reason"]
        outcome.n_tokens = answer["usage"]["completion_tokens"]
        outcome.done = True


def _code(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return body.decode("utf-8", "replace")[:80]
