"""An HTTP server that does as it is told: `answer` gives, for each request, the bytes to send and the seconds to wait in between."""

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import trio

Step = bytes | float | None  # bytes to send, seconds to wait, None to close at once
Script = Callable[[str, dict[str, Any]], Iterator[Step]]

STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(value: Any) -> bytes:
    return chunk(b"data: " + json.dumps(value).encode() + b"\n\n")


def text(words: str) -> bytes:
    return event({"choices": [{"index": 0, "text": words, "finish_reason": None}]})


def usage(prompt: int, completion: int, cached: int | None = None) -> bytes:
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
    return event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion, **details}})


def done() -> bytes:
    return chunk(b"data: [DONE]\n\n") + END


def whole(body: Any, status: str = "200 OK") -> bytes:
    data = json.dumps(body).encode()
    return b"HTTP/1.1 %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (status.encode(), len(data), data)


def counted(prompt: int) -> bytes:
    """The answer to a request that is no stream."""
    return whole({"choices": [{"index": 0, "text": "x"}], "usage": {"prompt_tokens": prompt, "completion_tokens": 1}})


class ScriptedServer:
    """`bodies` are those of all streams asked for after the probe; `connections` counts those that were opened."""

    def __init__(self, answer: Script, *, models: Any = None) -> None:
        self._answer = answer
        self._models = {"data": [{"id": "scripted", "max_model_len": 4096}]} if models is None else models
        self.bodies: list[dict[str, Any]] = []
        self.connections = 0
        self.url = ""

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        self.url = f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}"
        task_status.started()
        await trio.serve_listeners(self._serve, listeners)

    async def _serve(self, stream: trio.SocketStream) -> None:
        self.connections += 1
        with suppress(trio.BrokenResourceError):
            async with stream:
                held = b""
                while True:
                    while b"\r\n\r\n" not in held:
                        more = await stream.receive_some()
                        if not more:
                            return
                        held += more
                    head, _, held = held.partition(b"\r\n\r\n")
                    method, path, _ = head.split(b"\r\n")[0].decode().split()
                    fields = {name.lower(): value.strip() for name, _, value in (line.partition(b":") for line in head.split(b"\r\n")[1:])}
                    length = int(fields.get(b"content-length", b"0"))
                    while len(held) < length:
                        held += await stream.receive_some()
                    body, held = held[:length], held[length:]
                    for step in self._steps(method, path, body):
                        if step is None:
                            return
                        await (trio.sleep(step) if isinstance(step, float) else stream.send_all(step))

    def _steps(self, method: str, path: str, body: bytes) -> Iterator[Step]:
        if method == "GET":
            return iter([whole(self._models)])
        fields = json.loads(body)
        if fields["max_tokens"] > 1:
            self.bodies.append(fields)
        return self._answer(path, fields)
