"""`relay chat` against a server that answers as it is told to."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from click.testing import CliRunner

from relay.cli.chat import chat

_ANSWER = b'data: {"choices": [{"delta": {"content": "Yes."}}]}\n\ndata: [DONE]\n\n'


class Scripted(ThreadingHTTPServer):
    """Refuses the second question, and keeps what it was asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[list[dict[str, Any]]] = []


class Handler(BaseHTTPRequestHandler):
    server: Scripted

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body["messages"])
        refused = len(self.server.asked) == 2
        self.send_response(503 if refused else 200)
        self.end_headers()
        self.wfile.write(b'{"error": {"message": "come again"}}' if refused else _ANSWER)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Scripted]:
    with Scripted() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_refused_question_does_not_end_the_conversation(server: Scripted) -> None:
    url = f"http://127.0.0.1:{server.server_port}"
    result = CliRunner().invoke(chat, ["--url", url, "--model", "m"], input="one\ntwo\nthree\n")
    assert "503: come again" in result.output
    assert [message["content"] for message in server.asked[2]] == ["one", "Yes.", "three"]
    assert result.exit_code == 1
