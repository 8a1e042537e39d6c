"""`relay chat`: talk to a running server in the terminal; answers stream as they are made."""

import http.client
import importlib
import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import click
from rich.console import Console

from relay.errors import StartError


@click.command()
@click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="Where the server listens.")
@click.option("--model", default=None, help="Default: the first one that the server lists.")
@click.option("--system", default=None, help="A system message to begin with.")
@click.option("--temperature", type=float, default=0.7, show_default=True)
@click.option("--max-tokens", type=int, default=None, help="Of one answer; default: the server's.")
@click.option("--key", default=None, help="API key, if the server asks for one.")
def chat(url: str, model: str | None, system: str | None, temperature: float, max_tokens: int | None, key: str | None) -> None:
    """Chat with a server. An empty line or Ctrl-D ends; Ctrl-C stops an answer. A question that the server refuses is
    said to be, and forgotten; where questions come from a pipe the status is 1 then."""
    console = Console(highlight=False)
    client = _Client(url, key)
    name = model or client.first_model()
    messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
    console.print(f"[dim]{name} at {url}; an empty line ends[/dim]")
    if sys.stdin.isatty():
        with suppress(ImportError):
            importlib.import_module("readline")  # `input` edits lines with it
    failed = False
    while True:
        try:
            question = input("> ") if sys.stdin.isatty() else sys.stdin.readline().rstrip("\n")
        except (EOFError, KeyboardInterrupt):
            console.print()
            break
        if not question.strip():
            break
        messages.append({"role": "user", "content": question})
        body = {"model": name, "messages": messages, "stream": True, "temperature": temperature, "max_tokens": max_tokens}
        answer = ""
        try:
            for piece in client.stream(body):
                answer += piece
                console.print(piece, end="", markup=False, soft_wrap=True)
        except KeyboardInterrupt:
            console.print(" [dim](stopped)[/dim]", end="")
        except (StartError, OSError, http.client.HTTPException) as error:
            console.print()
            click.echo(f"relay: {error}", err=True)
            messages.pop()  # as if it had not been asked: what came before is still there
            failed = True
            continue
        console.print()
        messages.append({"role": "assistant", "content": answer})
    if failed and not sys.stdin.isatty():
        raise SystemExit(1)


class _Client:
    """The least that streams: the standard library's HTTP and server-sent events."""

    def __init__(self, url: str, key: str | None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise StartError(f"--url is `{url}`; expected something like http://127.0.0.1:8000")
        self._url = url
        self._class = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._host, self._port = parts.hostname, parts.port
        self._headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}

    def first_model(self) -> str:
        response = self._request("GET", "/v1/models", None)
        return str(json.loads(response.read())["data"][0]["id"])

    def stream(self, body: dict[str, Any]) -> Iterator[str]:
        """Pieces of text as they come. Raises StartError with the server's own words."""
        response = self._request("POST", "/v1/chat/completions", body)
        ended = False
        for line in response:
            if not line.startswith(b"data: "):
                continue
            data = line[6:].strip()
            if data == b"[DONE]":
                ended = True
                break
            event = json.loads(data)
            if "error" in event:
                raise StartError(f"the server says: {event['error']['message']}")
            for choice in event["choices"]:
                yield choice["delta"].get("content") or ""
        response.close()
        if not ended:
            raise StartError("the connection broke before the answer ended")

    def _request(self, method: str, path: str, body: dict[str, Any] | None) -> http.client.HTTPResponse:
        connection = self._class(self._host, self._port, timeout=600)
        try:
            connection.request(method, path, json.dumps(body).encode() if body is not None else None, self._headers)
            response = connection.getresponse()
        except OSError as error:
            raise StartError(f"no server answers at {self._url} ({error}); start one with scripts/serve") from error
        if response.status != 200:
            text = response.read().decode("utf-8", "replace")
            with suppress(ValueError, KeyError, TypeError):
                text = json.loads(text)["error"]["message"]
            raise StartError(f"the server answers {response.status}: {text}")
        return response
