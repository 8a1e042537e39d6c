"""Links: whole frames, nothing lost, repeated or reordered over cuts, bounded memory, garbage ends a connection and nothing else."""

import random
from collections.abc import Callable
from contextlib import suppress

import msgspec
import pytest
import trio
from trio.testing import MockClock, memory_stream_pair, wait_all_tasks_blocked

from relay.errors import FrameTooLarge
from relay.messages import Address, Refused
from relay.runtime.frames import MAX_FRAME, Ack, Credit, Deliver, Hello, Reader, decode_frame, pack
from relay.runtime.link import ACK_EVERY, Link, LinkState, read_hello
from relay.runtime.mailbox import AtOnce, Mailbox
from relay.runtime.node import Node

SINK = Address("sink", 1)
Stream = trio.StapledStream[trio.testing.MemorySendStream, trio.testing.MemoryReceiveStream]


def mail(n: int) -> Refused:
    return Refused(request_id="r", attempt=n, code="overloaded", message="x" * (n % 300))


def two(window: int = 64) -> tuple[Node, Link, Link, Mailbox]:
    """Node a, its link to b, b's link to a, and the mailbox of b's `sink`."""
    a, b = Node("a", 1, window=window), Node("b", 1, window=window)
    a_to_b, b_to_a = Link(a, "b", 1), Link(b, "a", 1)
    sink = b.open("sink").inbox
    a.up("b", 1, ("sink",), a_to_b)
    b.up("a", 1, (), b_to_a)
    return a, a_to_b, b_to_a, sink


async def accept(link: Link, stream: trio.abc.Stream) -> None:
    reader = Reader()
    hello = await read_hello(stream, reader)
    if hello is not None:
        await link.carry(stream, reader, hello)


async def take(box: Mailbox, n: int) -> list[int]:
    numbers: list[int] = []
    while len(numbers) < n:
        message = await anext(box)
        if isinstance(message, Refused):
            numbers.append(message.attempt)
    return numbers


def run(main: Callable[[], object]) -> None:
    trio.run(main, clock=MockClock(autojump_threshold=0))  # type: ignore[arg-type]


def test_reader_yields_whole_frames_from_any_cut_of_the_bytes() -> None:
    frames = [pack(Deliver(n, SINK, mail(n))) for n in range(50)]
    data, reader, draw, bodies = b"".join(frames), Reader(), random.Random(1), list[bytes]()
    while data:
        n = draw.randint(1, 200)
        bodies += reader.feed(data[:n])
        data = data[n:]
    assert [decode_frame(body) for body in bodies] == [Deliver(n, SINK, mail(n)) for n in range(50)]


def test_a_giant_frame_is_refused_by_its_reader_and_by_its_maker() -> None:
    with pytest.raises(FrameTooLarge):
        Reader().feed((MAX_FRAME + 1).to_bytes(4, "little"))
    with pytest.raises(FrameTooLarge):
        pack(Deliver(1, SINK, Refused(request_id="r", attempt=1, code="", message="x" * MAX_FRAME)))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"\x91\xa3Ack",
        b"\x92\xa4Nope\x01",
        pack(Ack(3))[4:-1],
        b"\x92\xa3Ack" + b"\x91" * 100_000,
        b"\x94\xa6Credit\x01\x92\xa1x\x01\x00",
    ],
)
def test_garbage_has_one_kind_of_error(body: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_frame(body)


def test_a_new_stream_begins_with_what_the_peer_does_not_have() -> None:
    state = LinkState()
    for n in (1, 2, 3):
        state.keep(b"%d" % n)
    assert state.chunk() == b"123"
    state.keep(b"4")
    state.restart(2)
    assert state.chunk() == b"34"
    state.acked(4)
    assert state.n_kept == 0


def test_numbers_that_cannot_be_are_refused() -> None:
    state = LinkState()
    state.keep(b"1")
    with pytest.raises(msgspec.ValidationError):
        state.acked(1)  # never written
    state.chunk()
    state.acked(1)
    with pytest.raises(msgspec.ValidationError):
        state.restart(0)  # what it had acknowledged is gone
    with pytest.raises(msgspec.ValidationError):
        state.restart(2)
    assert [state.fresh(1), state.fresh(1), state.fresh(2)] == [True, False, True]
    with pytest.raises(msgspec.ValidationError):
        state.fresh(4)


@pytest.mark.parametrize("seed", range(30))
def test_link_delivers_once_and_in_order_over_cuts_at_any_byte(seed: int) -> None:
    draw, n_messages = random.Random(seed), 150
    got: list[int] = []

    async def main() -> None:
        a, a_to_b, b_to_a, sink = two(window=16)

        async def produce() -> None:
            for n in range(n_messages):
                await a.send(SINK, mail(n))
                if draw.random() < 0.1:
                    await trio.sleep(0.01)

        async def cut_at_a_byte(source: trio.abc.ReceiveStream, target: trio.abc.SendStream, left: int) -> None:
            """Pass on so many bytes and no more; what was written beyond them is gone."""
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                while left > 0 and (data := await source.receive_some(min(left, draw.choice((20, 500))))):
                    await target.send_all(data)
                    left -= len(data)
            await target.aclose()
            await source.aclose()

        async def carry() -> None:
            while True:
                (left, proxy_left), (proxy_right, right) = memory_stream_pair(), memory_stream_pair()
                n_bytes = draw.choice((0, 30, 300, 3000))
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(a_to_b.carry, left, Reader())
                    nursery.start_soon(accept, b_to_a, right)
                    nursery.start_soon(cut_at_a_byte, proxy_left, proxy_right, draw.randint(0, n_bytes))
                    nursery.start_soon(cut_at_a_byte, proxy_right, proxy_left, draw.randint(0, n_bytes))

        with trio.fail_after(1000):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(produce)
                nursery.start_soon(carry)
                got.extend(await take(sink, n_messages))
                nursery.cancel_scope.cancel()

    run(main)
    assert got == list(range(n_messages))


def test_a_new_stream_takes_over_from_one_whose_end_was_not_noticed() -> None:
    """The acceptor may still read the old stream when the connector is back; two writers would share out the frames."""

    async def main() -> None:
        a, a_to_b, b_to_a, sink = two(window=1000)
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                for link, name in ((a_to_b, "b"), (b_to_a, "a")):  # each has a stream that leads nowhere, and has no end
                    ours, nowhere = memory_stream_pair()
                    await nowhere.send_all(pack(Hello(name, 1, "", 0)))
                    nursery.start_soon(link.carry, ours, Reader())
                await wait_all_tasks_blocked()
                for n in range(20):
                    a.post(SINK, mail(n))
                await wait_all_tasks_blocked()
                left, right = memory_stream_pair()
                nursery.start_soon(a_to_b.carry, left, Reader())
                nursery.start_soon(accept, b_to_a, right)
                assert await take(sink, 20) == list(range(20))
                nursery.cancel_scope.cancel()

    run(main)


def test_a_one_way_stream_is_acknowledged_when_it_pauses() -> None:
    async def main() -> None:
        a, a_to_b, b_to_a, _ = two(window=1000)
        left, right = memory_stream_pair()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(a_to_b.carry, left, Reader())
            nursery.start_soon(accept, b_to_a, right)
            for n in range(ACK_EVERY // 2):
                a.post(SINK, mail(n))
            assert a_to_b.n_kept == ACK_EVERY // 2
            await trio.sleep(1)
            assert a_to_b.n_kept == 0
            for n in range(10 * ACK_EVERY):
                a.post(SINK, mail(n))
                await wait_all_tasks_blocked()
                assert a_to_b.n_kept <= ACK_EVERY
            nursery.cancel_scope.cancel()

    run(main)


def test_a_slow_actor_stops_only_those_who_write_to_it() -> None:
    async def main() -> None:
        a, a_to_b, b_to_a, slow = two(window=4)
        b = b_to_a._node
        quick = b.open("quick").inbox
        a.up("b", 1, ("quick",), a_to_b)
        left, right = memory_stream_pair()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(a_to_b.carry, left, Reader())
            nursery.start_soon(accept, b_to_a, right)
            with trio.move_on_after(10) as blocked:
                for n in range(5):
                    await a.send(SINK, mail(n))
            assert blocked.cancelled_caught
            assert len(slow) == 4
            with trio.fail_after(60):
                for n in range(100):
                    await a.send(Address("quick", 1), mail(n))
                    assert await take(quick, 1) == [n]
            nursery.cancel_scope.cancel()

    run(main)


def test_last_words_of_a_dead_peer_are_read_though_writing_to_it_fails() -> None:
    async def main() -> None:
        a, a_to_b, _, _ = two()
        me = a.open("me")
        left, right = memory_stream_pair()
        await right.send_all(pack(Hello("b", 1, "", 0)) + b"".join(pack(Deliver(n, me.address, mail(n))) for n in (1, 2, 3)))
        await right.send_stream.aclose()
        await right.receive_stream.aclose()
        a.post(SINK, mail(9))
        with trio.fail_after(60):
            await a_to_b.carry(left, Reader())
            assert await take(me.inbox, 3) == [1, 2, 3]

    run(main)


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        pack(Hello("somebody else", 1, "", 0)),
        pack(Ack(0)),
        pack(Hello("b", 1, "", 0)) + pack(Hello("b", 1, "", 0)),
        pack(Hello("b", 1, "", 0)) + pack(Deliver(2, SINK, mail(2))),
        pack(Hello("b", 1, "", 0)) + pack(Credit(1, SINK, 1)) + pack(Ack(77)),
        pack(Hello("b", 1, "", 9)),
    ],
)
def test_garbage_ends_the_connection_and_the_next_one_works(garbage: bytes) -> None:
    async def main() -> None:
        a, a_to_b, b_to_a, sink = two()
        left, right = memory_stream_pair()
        await right.send_all(garbage)
        with trio.fail_after(60):
            await a_to_b.carry(left, Reader())
            if pack(Credit(1, SINK, 1)) in garbage:
                return  # the impostor used up a sequence number: only the supervisor can help
            async with trio.open_nursery() as nursery:
                left, right = memory_stream_pair()
                nursery.start_soon(a_to_b.carry, left, Reader())
                nursery.start_soon(accept, b_to_a, right)
                a.post(SINK, mail(1))
                assert await take(sink, 1) == [1]
                nursery.cancel_scope.cancel()

    run(main)


def test_flushed_returns_when_all_is_written_and_not_before() -> None:
    async def main() -> None:
        a, a_to_b, b_to_a, sink = two()
        await a_to_b.flushed()
        a.post(SINK, mail(1))
        with trio.move_on_after(5) as waiting:
            await a_to_b.flushed()
        assert waiting.cancelled_caught, "nothing is connected"
        left, right = memory_stream_pair()
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(a_to_b.carry, left, Reader())
                nursery.start_soon(accept, b_to_a, right)
                await a_to_b.flushed()
                a_to_b.close()
                assert await take(sink, 1) == [1]

    run(main)


def test_a_closed_link_carries_nothing() -> None:
    async def main() -> None:
        _, a_to_b, b_to_a, _ = two()
        left, right = memory_stream_pair()
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(a_to_b.carry, left, Reader())
                nursery.start_soon(accept, b_to_a, right)
                await a_to_b.connected.wait()
                a_to_b.close()
            assert a_to_b.idle.is_set()
            left, right = memory_stream_pair()
            await a_to_b.carry(left, Reader())
            assert await right.receive_some() == b""

    run(main)


def test_of_what_is_read_together_one_message_at_most_is_taken_at_once() -> None:
    """A backlog is left to the mailbox, whose reader lets others have their turns between two messages; a message alone waits for none."""

    async def main() -> None:
        a, a_to_b, b_to_a, sink = two(window=64)
        at_once: list[int] = []
        sink.take_at_once(AtOnce(Refused, lambda message: at_once.append(message.attempt)))
        for n in range(5):
            a.offer(SINK, mail(n))
        here, there = memory_stream_pair()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(a_to_b.carry, here, Reader())
            nursery.start_soon(accept, b_to_a, there)
            await wait_all_tasks_blocked()
            assert at_once == []
            assert await take(sink, 5) == [0, 1, 2, 3, 4]
            a.offer(SINK, mail(5))
            await wait_all_tasks_blocked()
            assert at_once == [5]
            assert len(sink) == 0
            nursery.cancel_scope.cancel()

    run(main)
