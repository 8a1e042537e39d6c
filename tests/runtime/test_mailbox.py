"""Mailboxes and lanes: credits return when a message is taken, waiters wake, closing ends the iteration after what is there."""

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from relay.errors import LaneFull
from relay.messages import Address, Message, Refused, Up
from relay.runtime.mailbox import AtOnce, Lane, Life, Mailbox

TO = Address("sink", 1)


def mail(n: int) -> Refused:
    return Refused(request_id="r", attempt=n, code="overloaded", message="")


def test_a_full_lane_says_so_and_names_the_receiver() -> None:
    lane = Lane(TO, 2)
    lane.take()
    lane.take()
    with pytest.raises(LaneFull, match="sink@1"):
        lane.take()
    lane.give(1)
    lane.take()


def test_every_credit_given_wakes_one_who_waits_for_it() -> None:
    async def main() -> None:
        lane, through = Lane(TO, 2), 0
        lane.take()
        lane.take()

        async def taker() -> None:
            nonlocal through
            await lane.wait()
            lane.take()
            through += 1

        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                for _ in range(5):
                    nursery.start_soon(taker)
                for given, expected in ((2, 2), (1, 3), (2, 5)):
                    await wait_all_tasks_blocked()
                    lane.give(given)
                    await wait_all_tasks_blocked()
                    assert through == expected

    trio.run(main, clock=MockClock(autojump_threshold=0))


def test_a_cancelled_waiter_takes_no_credit_with_it() -> None:
    async def main() -> None:
        lane = Lane(TO, 1)
        lane.take()
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                scope = await nursery.start(wait_under_scope, lane)
                nursery.start_soon(lane.wait)
                await wait_all_tasks_blocked()
                scope.cancel()
                lane.give(1)

    trio.run(main, clock=MockClock(autojump_threshold=0))


async def wait_under_scope(lane: Lane, *, task_status: trio.TaskStatus[trio.CancelScope]) -> None:
    with trio.CancelScope() as scope:
        task_status.started(scope)
        await lane.wait()


def test_closing_a_lane_lets_its_waiters_go() -> None:
    async def main() -> None:
        lane = Lane(TO, 1)
        lane.take()
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                for _ in range(3):
                    nursery.start_soon(lane.wait)
                await wait_all_tasks_blocked()
                lane.close()

    trio.run(main, clock=MockClock(autojump_threshold=0))


def test_taking_a_message_tells_where_its_credit_belongs() -> None:
    taken: list[tuple[Life | None, Message]] = []

    async def main() -> None:
        box = Mailbox(lambda origin, message: taken.append((origin, message)))
        box.put(("a", 1), mail(0))
        box.put(None, mail(1))
        assert len(box) == 2
        assert await anext(box) == mail(0)
        assert taken == [(("a", 1), mail(0))], "a message that lies in the box is not taken"
        assert await anext(box) == mail(1)

    trio.run(main)
    assert taken == [(("a", 1), mail(0)), (None, mail(1))]


def test_a_closed_mailbox_gives_what_it_has_and_ends() -> None:
    async def main() -> None:
        box = Mailbox(lambda origin, message: None)
        got: list[Message] = []

        async def read() -> None:
            got.extend([message async for message in box])

        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(read)
                await wait_all_tasks_blocked()
                box.put(None, mail(0))
                box.put(None, mail(1))
                box.close()
                box.put(None, mail(2))
        assert got == [mail(0), mail(1)]

    trio.run(main, clock=MockClock(autojump_threshold=0))


def test_a_cancelled_reader_loses_no_message() -> None:
    async def main() -> None:
        box = Mailbox(lambda origin, message: None)
        with trio.move_on_after(1) as scope:
            await anext(box)
        assert scope.cancelled_caught
        box.put(None, mail(0))
        with trio.CancelScope() as scope:
            scope.cancel()
            await anext(box)
        assert await anext(box) == mail(0)

    trio.run(main, clock=MockClock(autojump_threshold=0))


def test_what_may_be_is_taken_at_once_and_never_overtakes() -> None:
    taken: list[tuple[Life | None, Message]] = []
    handled: list[Message] = []
    in_hand = False

    async def main() -> None:
        nonlocal in_hand
        box = Mailbox(lambda origin, message: taken.append((origin, message)))
        box.take_at_once(AtOnce(Refused, handled.append, lambda: not in_hand))
        box.put(("a", 1), mail(0), at_once=True)
        assert handled == [mail(0)]
        assert taken == [(("a", 1), mail(0))], "and its credit goes back"
        box.put(None, mail(1))
        box.put(("a", 1), mail(2), at_once=True)
        assert handled == [mail(0)], "behind what lies there it waits"
        assert [await anext(box), await anext(box)] == [mail(1), mail(2)]
        in_hand = True
        box.put(("a", 1), mail(3), at_once=True)
        assert await anext(box) == mail(3)
        in_hand = False
        box.put(None, Up(address=TO), at_once=True)
        assert await anext(box) == Up(address=TO), "of another kind"
        box.take_at_once(None)
        box.put(None, mail(4), at_once=True)
        assert await anext(box) == mail(4)
        box.close()
        box.take_at_once(AtOnce(Refused, handled.append))
        box.put(None, mail(5), at_once=True)

    trio.run(main)
    assert handled == [mail(0)]


def test_what_is_raised_while_a_message_is_taken_at_once_is_raised_to_the_actor() -> None:
    """In its link, the whole worker would end before the actor could say so to anybody."""

    async def main() -> None:
        def fail(message: object) -> None:
            raise ValueError("a defect")

        box = Mailbox(lambda origin, message: None)
        box.take_at_once(AtOnce(Refused, fail))

        async def put() -> None:
            await wait_all_tasks_blocked()
            box.put(("a", 1), mail(0), at_once=True)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(put)
            with pytest.raises(ValueError, match="a defect"):
                await anext(box)

    trio.run(main)
