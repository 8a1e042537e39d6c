"""Streamed answers: read by a strict event parser a byte at a time, by the official client's types, and by the client itself."""

import json
import socketserver
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

import msgspec
import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletionChunk

from relay import errors
from relay.openai.logprob import Candidate, Scored, Scores, chat_logprobs, completion_logprobs
from relay.openai.response import Head
from relay.openai.stream import DONE, KEEP_ALIVE, ChatStream, CompletionStream, EventStream, error_event
from relay.openai.usage import usage

HEAD = Head(request_id="r1", created=1700000000, model='m"%s', fingerprint="fp")
USAGE = usage(prompt=5, completion=3, cached=0)
PIECES = ["The", " quick\n\ndata: [DONE]\n\n", "", "\r", " br\u2028ö\x85wn", ' "fox"\\', "👨‍👩‍👧\x00"]
STREAMS = [ChatStream, CompletionStream]
NEVER = -float("inf")


class StrictParser:
    """The event stream grammar and no more: each event is one `data: ` line and one empty line, comments stand alone."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.comments: list[str] = []
        self._buffer = b""

    def feed(self, received: bytes) -> None:
        self._buffer += received
        while b"\n\n" in self._buffer:
            event, self._buffer = self._buffer.split(b"\n\n", 1)
            text = event.decode()
            assert text.splitlines() == [text], "one line, for any reader's idea of a line"
            if text.startswith(":"):
                self.comments.append(text)
            else:
                assert text.startswith("data: ")
                self.events.append(text.removeprefix("data: "))

    def close(self) -> None:
        assert self._buffer == b"", "nothing but whole events"


def parsed(stream: bytes) -> list[dict[str, Any]]:
    """Events before `[DONE]`, read a byte at a time."""
    parser = StrictParser()
    for byte in stream:
        parser.feed(bytes([byte]))
    parser.close()
    assert parser.events.count("[DONE]") == 1
    assert parser.events[-1] == "[DONE]"
    return [json.loads(event) for event in parser.events[:-1]]


def whole(stream: EventStream, n: int = 1, *, include_usage: bool = False) -> bytes:
    """What a gateway sends for `n` choices that take turns."""
    sent = [KEEP_ALIVE]
    for piece in PIECES:
        sent += [stream.text(choice, piece) for choice in range(n)]
    sent += [stream.finish(choice, "length" if choice else "stop") for choice in range(n)]
    if include_usage:
        sent.append(stream.usage(USAGE))
    return b"".join([*sent, DONE])


def text_of(choice: dict[str, Any]) -> str:
    found = choice["text"] if "text" in choice else choice["delta"].get("content", "")
    assert isinstance(found, str)
    return found


@pytest.mark.parametrize("kind", STREAMS)
def test_each_event_stands_alone_even_if_bytes_come_one_by_one(kind: type[ChatStream | CompletionStream]) -> None:
    """llama.cpp#14268 (two events read as one), TGI#2221 (no [DONE])."""
    events = parsed(whole(kind(HEAD, 1)))
    assert "".join(text_of(event["choices"][0]) for event in events) == "".join(PIECES)
    assert {(event["model"], event["created"], event["system_fingerprint"]) for event in events} == {('m"%s', 1700000000, "fp")}


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("n", [1, 3])
def test_each_choice_finishes_once_and_last(kind: type[ChatStream | CompletionStream], n: int) -> None:
    """TGI#2336 and dynamo#1856 (no finish_reason), litellm#376 (too early), litellm#3276 (wrong index with n = 2 and more)."""
    events = parsed(whole(kind(HEAD, n), n))
    for choice in range(n):
        own = [event["choices"][0] for event in events if event["choices"][0]["index"] == choice]
        assert "".join(map(text_of, own)) == "".join(PIECES)
        reasons = [event["finish_reason"] for event in own]
        assert reasons == [None] * (len(own) - 1) + ["length" if choice else "stop"]
        assert text_of(own[-1]) == ""
        assert own[-1].get("delta", {}) == {}


def test_the_role_is_in_the_first_delta_of_each_choice_and_nowhere_else() -> None:
    """dynamo#12639: delta.role was repeated in each chunk."""
    events = parsed(whole(ChatStream(HEAD, 3), 3))
    for choice in range(3):
        deltas = [event["choices"][0]["delta"] for event in events if event["choices"][0]["index"] == choice]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert not any("role" in delta for delta in deltas[1:])


def test_a_choice_without_text_still_has_its_role_and_its_finish() -> None:
    events = parsed(ChatStream(HEAD, 1).finish(0, "stop") + DONE)
    assert [event["choices"][0]["delta"] for event in events] == [{"role": "assistant", "content": ""}, {}]
    assert [event["choices"][0]["finish_reason"] for event in events] == [None, "stop"]


@pytest.mark.parametrize("kind", STREAMS)
def test_usage_comes_once_after_the_last_finish_with_no_choices(kind: type[ChatStream | CompletionStream]) -> None:
    """vllm#7262 (usage on every chunk), litellm#25410 (order: content, finish, usage, [DONE])."""
    *events, last = parsed(whole(kind(HEAD, 2, include_usage=True), 2, include_usage=True))
    assert all(event["usage"] is None and event["choices"] for event in events)
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == 8
    assert events[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("kind", STREAMS)
def test_no_usage_unless_asked_for(kind: type[ChatStream | CompletionStream]) -> None:
    """vllm#36379: usage came unasked."""
    assert not any("usage" in event for event in parsed(whole(kind(HEAD, 1))))


@pytest.mark.parametrize("kind", STREAMS)
def test_continuous_usage_is_on_every_event_with_text(kind: type[ChatStream | CompletionStream]) -> None:
    """vllm#7262: guidellm asks for it."""
    stream = kind(HEAD, 1, include_usage=True)
    sent = [stream.text(0, "a", usage=usage(prompt=5, completion=i, cached=1)) for i in (1, 2)]
    sent += [stream.finish(0, "stop", usage=usage(prompt=5, completion=2, cached=1)), stream.usage(USAGE), DONE]
    counts = [event["usage"] and event["usage"]["completion_tokens"] for event in parsed(b"".join(sent))]
    assert counts[-4:] == [1, 2, 2, 3]


def test_the_order_of_calls_is_held_to() -> None:
    stream = ChatStream(HEAD, 2)
    with pytest.raises(AssertionError, match="usage before"):
        stream.usage(USAGE)
    stream.finish(1, "stop")
    with pytest.raises(AssertionError, match="finished twice"):
        stream.finish(1, "stop")
    with pytest.raises(AssertionError, match="text after"):
        stream.text(1, "x")
    assert b'"index":0' in stream.text(0, "x")


def scored() -> list[Scored]:
    top = (Candidate(1, "a", b"a", -0.1), Candidate(2, "\u2028", "\u2028".encode(), -0.7), Candidate(3, "\ufffd", b"\xe2", NEVER))
    return [Scored(top[0], "a", top), Scored(top[2], "", top), Scored(top[1], "é\u2028", top), Scored(top[0], "a")]


def of(stream: EventStream, tokens: Sequence[Scored], offset: int = 0) -> Scores:
    scores = stream.scores(offset)
    scores.add(tokens)
    return scores


def test_streamed_chat_logprobs_join_to_those_of_the_whole_answer() -> None:
    """vllm#3179 (the format), sglang#2825 (two tokens in one chunk)."""
    stream, tokens = ChatStream(HEAD, 1), scored()
    parts = (("a", tokens[:1]), ("é\u2028a", tokens[1:]))
    sent = [stream.text(0, text, scores=of(stream, part)) for text, part in parts] + [stream.finish(0, "stop"), DONE]
    choices = [event["choices"][0] for event in parsed(b"".join(sent))]
    content = [token for choice in choices if choice["logprobs"] for token in choice["logprobs"]["content"]]
    assert content == msgspec.to_builtins(chat_logprobs(tokens).content)


def test_streamed_completion_logprobs_join_to_those_of_the_whole_answer() -> None:
    """vllm#5334: offsets go on from chunk to chunk, for each choice by itself."""
    stream, tokens = CompletionStream(HEAD, 2), scored()
    sent = [stream.text(1, "zz", scores=of(stream, [Scored(Candidate(9, "zz", b"zz", -1.0), "zz")]))]
    parts = (("a", tokens[:1], 0), ("é\u2028", tokens[1:3], 1), ("a", tokens[3:], 3))
    sent += [stream.text(0, text, scores=of(stream, part, offset)) for text, part, offset in parts]
    sent += [stream.finish(0, "stop"), stream.finish(1, "stop"), DONE]
    found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for event in parsed(b"".join(sent)):
        choice = event["choices"][0]
        if choice["index"] == 0 and choice["logprobs"]:
            for name, values in choice["logprobs"].items():
                found[name] += values
    assert found == msgspec.to_builtins(completion_logprobs(tokens))
    assert found["text_offset"] == [0, 1, 1, 3]


def test_every_chunk_reads_strictly_with_the_official_types() -> None:
    stream = ChatStream(HEAD, 1, include_usage=True)
    chat = [
        stream.text(0, "a", scores=of(stream, scored()), usage=USAGE),
        stream.text(0, "b"),
        stream.finish(0, "stop"),
        stream.usage(USAGE),
        DONE,
    ]
    for event in parsed(b"".join(chat)):
        chunk = ChatCompletionChunk.model_validate_json(json.dumps(event), strict=True)
        assert (chunk.id, chunk.object) == ("chatcmpl-r1", "chat.completion.chunk")
        assert not chunk.model_extra
    other = CompletionStream(HEAD, 1, include_usage=True)
    sent = [
        other.text(0, "a", scores=of(other, scored()), usage=USAGE),
        other.text(0, "b"),
        other.finish(0, "length"),
        other.usage(USAGE),
        DONE,
    ]
    for event in parsed(b"".join(sent)):
        if event["choices"] and event["choices"][0]["finish_reason"] is None:
            event["choices"][0]["finish_reason"] = "stop"  # the client's type has no null here, though OpenAI sends it
        completion = Completion.model_validate_json(json.dumps(event), strict=True)
        assert (completion.id, completion.object) == ("cmpl-r1", "text_completion")


@contextmanager
def client_of(pieces: Sequence[bytes]) -> Iterator[openai.OpenAI]:
    """The official client, connected to a server that answers any POST with these bytes as an event stream."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            for piece in pieces:
                self.wfile.write(piece)
                self.wfile.flush()

        def log_message(self, *args: Any, **kwargs: Any) -> None:
            """Nothing on standard error."""

    with socketserver.TCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            with openai.OpenAI(base_url=f"http://127.0.0.1:{server.server_address[1]}/v1", api_key="None", max_retries=0) as client:
                yield client
        finally:
            server.shutdown()
            thread.join()


def test_the_official_client_reads_a_chat_stream_that_comes_byte_by_byte() -> None:
    sent = whole(ChatStream(HEAD, 1, include_usage=True), include_usage=True)
    with client_of([bytes([byte]) for byte in sent]) as client:
        chunks = list(client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}], stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "".join(PIECES)
    assert [chunk.usage.total_tokens for chunk in chunks if chunk.usage] == [8]
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"


def test_the_official_client_reads_a_completion_stream() -> None:
    with client_of([whole(CompletionStream(HEAD, 1))]) as client:
        chunks = list(client.completions.create(model="m", prompt="hi", stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "".join(PIECES)


def test_the_official_client_raises_from_an_error_inside_a_stream() -> None:
    """TGI#2668: errors in a stream were not in a form that the client raises."""
    sent = [ChatStream(HEAD, 1).text(0, "a"), error_event(errors.Unavailable("worker\nlost"), "r1")]
    with client_of(sent) as client, pytest.raises(openai.APIError, match="worker") as raised:
        list(client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}], stream=True))
    assert raised.value.code == "worker_lost"
    assert raised.value.type == "server_error"
    assert raised.value.body == {
        "message": "worker\nlost",
        "type": "server_error",
        "param": None,
        "code": "worker_lost",
        "request_id": "r1",
    }
