"""HTTP responses from bytes cut anywhere."""

import pytest

from relay.bench.response import ResponseReader

CHUNKED = (
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX-Request-ID: r1\r\n\r\n"
    b"5\r\nhello\r\n1;name=value\r\n \r\nB\r\nwide\r\nworld\r\n0\r\nTrailer: x\r\n\r\n"
)


def read(data: bytes, size: int) -> tuple[ResponseReader, bytes]:
    reader = ResponseReader()
    body = b"".join(reader.feed(data[i : i + size]) for i in range(0, len(data), size))
    return reader, body


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 1000])
def test_chunks_are_the_same_however_the_bytes_are_cut(size: int) -> None:
    reader, body = read(CHUNKED, size)
    assert (reader.status, reader.headers[b"x-request-id"]) == (200, b"r1")
    assert body == b"hello wide\r\nworld"
    assert reader.complete
    assert reader.keep_alive
    assert reader.problem == ""


def test_a_chunked_body_is_not_complete_before_its_last_byte() -> None:
    reader, _ = read(CHUNKED[:-1], 1000)
    assert not reader.complete
    reader.end()
    assert not reader.complete


@pytest.mark.parametrize("size", [1, 4, 1000])
def test_a_body_of_known_length(size: int) -> None:
    reader, body = read(b"HTTP/1.1 503 Busy\r\nContent-Length: 4\r\nConnection: close\r\n\r\nbusyrest", size)
    assert (reader.status, body, reader.complete, reader.keep_alive) == (503, b"busy", True, False)


def test_a_body_without_a_length_ends_with_the_connection() -> None:
    reader, body = read(b"HTTP/1.0 200 OK\r\n\r\nsome", 3)
    assert (body, reader.complete, reader.keep_alive) == (b"some", False, False)
    reader.end()
    assert reader.complete


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"SSH-2.0-OpenSSH\r\n\r\n", "not an HTTP/1.1 response"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n", "not the size of a chunk"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\n", "not the size of a chunk"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70_000, "a response head of more than 65536 bytes"),
    ],
)
def test_what_is_no_http_is_a_problem_and_reads_nothing_more(data: bytes, words: str) -> None:
    reader, body = read(data, 1000)
    assert words in reader.problem
    assert body == b""
    assert reader.feed(b"5\r\nhello\r\n") == b""
    assert not reader.complete
