"""Server-sent events from bytes cut anywhere."""

import pytest

from relay.bench.sse import EventReader

STREAM = b': keep-alive\n\ndata: {"a":1}\n\nevent: x\ndata:two\ndata: lines\nid: 7\n\n\ndata: [DONE]\n\n'
EVENTS = [b'{"a":1}', b"two\nlines", b"[DONE]"]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
def test_events_are_the_same_however_the_bytes_are_cut(size: int, line_end: bytes) -> None:
    reader = EventReader()
    stream = STREAM.replace(b"\n", line_end) + b"data: next"  # something must follow a lone carriage return
    events = [event for i in range(0, len(stream), size) for event in reader.feed(stream[i : i + size])]
    assert events == EVENTS


def test_an_event_without_its_blank_line_is_none() -> None:
    reader = EventReader()
    assert reader.feed(b"data: [DONE]\n") == []
    assert reader.feed(b"\n") == [b"[DONE]"]


def test_one_whole_event_at_once_is_read_as_its_line() -> None:
    reader = EventReader()
    assert reader.feed(b"data: one\n\n") == [b"one"]
    assert reader.feed(b"data: two\n\ndata: three\n\n") == [b"two", b"three"]
    assert reader.feed(b"data: cut\rshort\n\n") == [b"cut"]
