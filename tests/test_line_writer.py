"""Lines never wait for their reader, and fail with nobody."""

import os
import threading

import pytest

from relay.line_writer import LineWriter


def test_lines_come_out_in_order_and_finish_waits_for_them() -> None:
    read, write = os.pipe()
    writer = LineWriter(write)
    for n in range(100):
        writer.write(f"line {n}\n")
    writer.finish(60)
    assert os.read(read, 1 << 16).decode().splitlines() == [f"line {n}" for n in range(100)]
    os.close(read)
    os.close(write)


def test_a_pipe_that_nobody_reads_costs_lines_and_says_so_later() -> None:
    read, write = os.pipe()
    writer = LineWriter(write, most_bytes=20_000)
    for _ in range(3_000):  # 300 kB; the pipe takes 64, the queue 20
        writer.write("x" * 99 + "\n")
    assert writer.n_lost > 1000
    got: list[bytes] = []

    def drain() -> None:
        while data := os.read(read, 1 << 16):
            got.append(data)

    reader = threading.Thread(target=drain)
    reader.start()
    writer.finish(60)
    writer.write("afterwards\n")
    writer.finish(60)
    assert writer.n_lost == 0
    os.close(write)
    reader.join(60)
    text = b"".join(got).decode()
    assert text.endswith("afterwards\n")
    assert '"log_lines_lost"' in text
    os.close(read)


@pytest.mark.parametrize("kind", ["closed", "full"])
def test_what_cannot_be_written_is_counted_and_raises_nothing(kind: str) -> None:
    if kind == "closed":
        read, write = os.pipe()
        os.close(read)
    else:
        write = os.open("/dev/full", os.O_WRONLY)
    writer = LineWriter(write)
    for _ in range(3):
        writer.write("lost\n")
    writer.finish(60)
    assert writer.n_lost == 3
    os.close(write)


def test_a_stream_that_was_closed_before_the_start_takes_everything() -> None:
    writer = LineWriter(None)
    assert writer.write("nowhere\n") == 8
    writer.finish(60)
    assert not writer.isatty()
