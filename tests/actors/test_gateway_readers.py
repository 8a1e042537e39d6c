"""Readers of one resumable stream that come one after another to the same gateway: the last has it, whatever was meant for earlier ones."""

from collections.abc import Callable

import trio

from relay.actors.gateway import Bell, Flight, GatewayActor
from relay.errors import StreamLost
from relay.ledger.ledger import Ledger
from relay.messages import Address, Cancel, Detach, Displaced, Message, Refused, Resumable, Resume, Sampling, Spent, Stopping
from relay.runtime.node import Node
from tests.actors.road import Road

DECODE = Address("decode/0", 1)


def flight(attempt: int = 1) -> Flight:
    resumable = Resumable("mine", b"")
    return Flight("r1", (1, 2), Sampling(), Stopping(max_tokens=8), Ledger(0), Bell(), resumable=resumable, attempt=attempt)


def with_gateway(play: Callable[[GatewayActor, Callable[[Message], None], Road], None], *, window: int = 4096) -> None:
    async def main() -> None:
        node, road = Node("gateway-0", 1, window=window), Road()
        context = node.open("gateway/0")
        node.up("decode-0", 1, ("decode/0",), road)
        gateway = GatewayActor(max_attempts=3, on_event=lambda event: None)
        gateway._context = context
        play(gateway, gateway._on, road)  # type: ignore[arg-type]

    trio.run(main)


def test_news_that_were_meant_for_an_earlier_reader_end_no_later_one() -> None:
    """Another gateway took the stream from the first; then the second came here, before that was told."""

    def play(gateway: GatewayActor, on: Callable[[Message], None], road: Road) -> None:
        first, second = flight(), flight()
        gateway.take_over(first, DECODE)
        gateway.take_over(second, DECODE)
        assert isinstance(first.error, StreamLost)
        numbers = [message.reader for message in road.sent if isinstance(message, Resume)]
        assert numbers == sorted(set(numbers))
        on(Displaced(request_id="r1", attempt=1, reason="another gateway resumed this stream", lost=True, reader=numbers[0]))
        assert not second.ended
        on(Displaced(request_id="r1", attempt=1, reason="another gateway resumed this stream", lost=True, reader=numbers[1]))
        assert isinstance(second.error, StreamLost)

    with_gateway(play)


def test_what_a_left_stream_came_to_is_told_once_and_not_less_than_was_seen() -> None:
    def play(gateway: GatewayActor, on: Callable[[Message], None], road: Road) -> None:
        told: list[tuple[int, bool]] = []
        one = flight()
        gateway.take_over(one, DECODE)
        one.ids += [7, 8, 9]
        assert gateway.goes_on(one)
        gateway.leave(one, "the client left", lambda n, resumed: told.append((n, resumed)))
        assert any(isinstance(message, Detach) for message in road.sent)
        on(Spent(request_id="r1", attempt=1, n_generated=2))
        on(Spent(request_id="r1", attempt=1, n_generated=8))
        assert told == [(3, False)]

    with_gateway(play)


def test_whoever_comes_back_to_the_same_gateway_takes_over_what_the_one_who_left_would_have_been_told() -> None:
    def play(gateway: GatewayActor, on: Callable[[Message], None], road: Road) -> None:
        told: list[tuple[int, bool]] = []
        one = flight()
        gateway.take_over(one, DECODE)
        gateway.leave(one, "the client left", lambda n, resumed: told.append((n, resumed)))
        gateway.take_over(flight(), DECODE)
        on(Spent(request_id="r1", attempt=1, n_generated=8))
        assert told == [(0, True)]

    with_gateway(play)


def test_who_leaves_at_once_is_not_told_to_have_left_before_it_came() -> None:
    """However full the lane is. Else the decode worker sends to nobody, and the key's place is never given back."""

    def play(gateway: GatewayActor, on: Callable[[Message], None], road: Road) -> None:
        gateway._context.post(DECODE, Refused(request_id="another", attempt=1, code="", message="takes the only credit"))
        one = flight()
        gateway.take_over(one, DECODE)
        gateway.leave(one, "the client left")
        assert [type(message) for message in road.sent] == [Refused, Resume, Detach]

    with_gateway(play, window=1)


def test_a_stop_string_ends_an_answer_and_a_client_that_leaves_does_not() -> None:
    def play(gateway: GatewayActor, on: Callable[[Message], None], road: Road) -> None:
        for answered in (True, False):
            one = flight()
            gateway.take_over(one, DECODE)
            gateway.close(one, "whatever", answered=answered)
        assert [message.answered for message in road.sent if isinstance(message, Cancel)] == [True, False]

    with_gateway(play)
