"""The switchboard: local mail, who is told of whom, Down once and last, mail for the dead, and addresses that are named early."""

from collections.abc import Callable

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from relay.errors import FrameTooLarge, LaneFull
from relay.messages import Address, Cancel, Down, Message, Oversized, Refused, Returned, Scores, Up
from relay.runtime.node import Context, Node

X = Address("x", 1)
LARGE = Scores(request_id="r", attempt=1, logprobs=())


class MemoryLink:
    """An Outlet that writes down what it is given."""

    def __init__(self) -> None:
        self.mail: list[tuple[Address, Message]] = []
        self.credits: list[int] = []
        self.too_large = False
        self.fits: Callable[[Message], bool] = lambda body: True

    def deliver(self, to: Address, body: Message) -> None:
        if self.too_large or not self.fits(body):
            raise FrameTooLarge("too large")
        self.mail.append((to, body))

    def credit(self, to: Address, n: int) -> None:
        self.credits.append(n)


def mail(n: int) -> Refused:
    return Refused(request_id="r", attempt=n, code="overloaded", message="")


def with_peer(window: int = 8, *, hold_early: bool = False) -> tuple[Node, Context, MemoryLink]:
    node, link = Node("a", 1, window=window, hold_early=hold_early), MemoryLink()
    me = node.open("me")
    node.up("b", 1, ("x",), link)
    return node, me, link


def seen(node: Node, me: Context) -> list[Message]:
    """Everything in the mailbox, which is closed by this."""
    node.close()

    async def main() -> list[Message]:
        return [message async for message in me.inbox]

    return trio.run(main)


def test_local_actors_exchange_the_very_same_objects() -> None:
    async def main() -> None:
        node = Node("w", 1)
        a, b = node.open("a"), node.open("b")
        node.up("w", 1, ("a", "b"))
        message = mail(1)
        a.post(b.address, message)
        assert [await anext(b.inbox), await anext(b.inbox)] == [Up(address=a.address), Up(address=b.address)]
        assert await anext(b.inbox) is message

    trio.run(main)


def test_a_local_lane_is_full_until_the_actor_takes() -> None:
    async def main() -> None:
        node = Node("w", 1, window=2)
        a, b = node.open("a"), node.open("b")
        a.post(b.address, mail(0))
        a.post(b.address, mail(1))
        with pytest.raises(LaneFull):
            a.offer(b.address, mail(2))
        await anext(b.inbox)
        a.post(b.address, mail(2))

    trio.run(main)


def test_what_frees_room_passes_a_full_lane() -> None:
    node, me, link = with_peer(window=1)
    me.post(X, mail(0))
    cancel, returned = Cancel(request_id="r", attempt=1, reason="left"), Returned(request_id="r", attempt=1)
    me.post(X, cancel)
    me.post(X, returned)
    with pytest.raises(LaneFull):
        me.offer(X, mail(1))
    assert [body for _, body in link.mail] == [mail(0), cancel, returned]
    node.delivered(("b", 1), me.address, cancel)
    assert seen(node, me)[-1] == cancel
    assert link.credits == [], "it cost no credit, so none goes back"


def test_what_is_posted_without_credit_goes_in_order_as_credits_come_back() -> None:
    node, me, link = with_peer(window=1)
    for n in range(3):
        me.post(X, mail(n))
    assert [body for _, body in link.mail] == [mail(0)]
    node.credited(X, 1)
    with pytest.raises(LaneFull):
        me.offer(X, mail(9))
    node.credited(X, 2)
    me.offer(X, mail(3))
    assert [body for _, body in link.mail] == [mail(0), mail(1), mail(2), mail(3)]


def test_what_waits_for_credits_of_the_dead_is_forgotten() -> None:
    node, me, link = with_peer(window=1)
    me.post(X, mail(0))
    me.post(X, mail(1))
    node.down("b", 1, "killed")
    node.credited(X, 1)
    assert [body for _, body in link.mail] == [mail(0)]


def test_credits_go_back_by_half_windows_when_taken() -> None:
    async def main() -> None:
        node, me, link = with_peer(window=8)
        for n in range(8):
            node.delivered(("b", 1), me.address, mail(n))
        assert link.credits == []
        for _ in range(9):  # an Up is there too
            await anext(me.inbox)
        assert link.credits == [4, 4]

    trio.run(main)


def test_send_waits_for_room_and_wakes_when_the_receiver_dies() -> None:
    async def main() -> None:
        node, me, link = with_peer(window=1)
        me.post(X, mail(0))
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(me.send, X, mail(1))
                await wait_all_tasks_blocked()
                assert len(link.mail) == 1
                node.credited(X, 1)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(me.send, X, mail(2))
                await wait_all_tasks_blocked()
                node.down("b", 1, "killed")
        assert [body for _, body in link.mail] == [mail(0), mail(1)]

    trio.run(main, clock=MockClock(autojump_threshold=0))


def test_two_actors_that_wait_for_each_others_room_never_wake() -> None:
    """Why `send` is for edges only, and all traffic inside a request is `post` with credits sized by admission."""

    async def flood(me: Context, other: Address) -> None:
        for n in range(10):
            await me.send(other, mail(n))

    async def main() -> None:
        node = Node("w", 1, window=2)
        a, b = node.open("a"), node.open("b")
        with trio.move_on_after(1000) as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(flood, a, b.address)
                nursery.start_soon(flood, b, a.address)
        assert scope.cancelled_caught

    trio.run(main, clock=MockClock(autojump_threshold=0))


def test_what_no_frame_can_hold_is_told_to_its_sender_and_costs_no_credit() -> None:
    node, me, link = with_peer(window=1)
    link.too_large = True
    me.post(X, LARGE)
    me.post(X, LARGE)
    link.too_large = False
    me.offer(X, mail(1))
    assert [body for _, body in link.mail] == [mail(1)]
    told = [message for message in seen(node, me) if isinstance(message, Oversized)]
    assert [(each.request_id, each.attempt, each.to) for each in told] == [("r", 1, X), ("r", 1, X)]


def test_what_was_put_off_and_no_frame_can_hold_lets_the_next_one_go() -> None:
    node, me, link = with_peer(window=1)
    for message in (mail(0), LARGE, mail(1)):
        me.post(X, message)
    link.fits = lambda body: body is not LARGE
    node.credited(X, 1)
    assert [body for _, body in link.mail] == [mail(0), mail(1)]
    with pytest.raises(LaneFull):
        me.offer(X, mail(2))
    node.credited(X, 1)
    me.offer(X, mail(2))
    assert any(isinstance(message, Oversized) for message in seen(node, me))


def test_what_was_held_for_an_address_that_was_named_early_may_be_too_large() -> None:
    node = Node("a", 1, hold_early=True)
    me, link = node.open("me"), MemoryLink()
    me.post(X, LARGE)
    me.post(X, mail(0))
    link.fits = lambda body: body is not LARGE
    node.up("b", 1, ("x",), link)
    assert [body for _, body in link.mail] == [mail(0)]
    assert any(isinstance(message, Oversized) for message in seen(node, me))


def test_down_comes_once_however_often_it_was_asked_for_and_mail_for_the_dead_is_dropped() -> None:
    node, me, link = with_peer()
    me.monitor(X)
    me.monitor(X)
    assert me.is_alive(X)
    node.down("b", 1, "killed")
    assert not me.is_alive(X)
    me.monitor(X)
    me.post(X, mail(0))
    assert link.mail == []
    assert seen(node, me) == [Up(address=X), Down(address=X, reason="killed")]


def test_whoever_asks_again_after_it_was_told_is_told_again() -> None:
    async def main() -> None:
        node, me, _ = with_peer()
        me.monitor(X)
        node.down("b", 1, "crashed", suspects=("r1",), lone=True)
        death = Down(address=X, reason="crashed", suspects=("r1",), lone=True)
        assert [await anext(me.inbox), await anext(me.inbox)] == [Up(address=X), death]
        me.monitor(X)
        assert await anext(me.inbox) == death, "who hears of it late must know the suspects too"

    trio.run(main)


def test_who_monitors_somebody_unknown_is_told_at_once() -> None:
    node, me, _ = with_peer()
    me.monitor(Address("nobody", 1))
    assert seen(node, me)[-1] == Down(address=Address("nobody", 1), reason="not alive")


def test_down_is_the_last_message_of_its_address() -> None:
    node, me, _ = with_peer()
    me.monitor(X)
    node.delivered(("b", 1), me.address, mail(0))
    node.down("b", 1, "killed")
    node.delivered(("b", 1), me.address, mail(1))
    assert seen(node, me) == [Up(address=X), mail(0), Down(address=X, reason="killed")]


def test_late_news_of_an_old_life_does_not_touch_the_new_one() -> None:
    node, me, _ = with_peer()
    new = MemoryLink()
    node.up("b", 2, ("x",), new)
    node.down("b", 1, "killed")
    me.post(Address("x", 2), mail(0))
    assert new.mail == [(Address("x", 2), mail(0))]
    node.down("b", 2, "killed")
    node.down("b", 1, "killed")


def test_mail_for_an_earlier_life_of_this_worker_is_dropped() -> None:
    node, link = Node("a", 2), MemoryLink()
    me = node.open("me")
    node.up("b", 1, ("x",), link)
    node.delivered(("b", 1), Address("me", 1), mail(0))
    node.delivered(("b", 1), Address("other", 2), mail(1))
    assert seen(node, me) == [Up(address=X)]


def test_an_actor_that_opens_later_is_told_who_is_up() -> None:
    node, _, _ = with_peer()
    node.up("c", 1, ("y",), MemoryLink())
    node.down("c", 1, "killed")
    assert seen(node, node.open("late")) == [Up(address=X)]


def test_an_address_named_early_is_held_for_and_gets_its_mail_when_it_is_up() -> None:
    node, me, _ = with_peer(hold_early=True)
    new, link = Address("x", 2), MemoryLink()
    me.monitor(new)
    me.post(new, mail(0))
    me.post(new, mail(1))
    assert me.is_alive(new)
    node.up("b", 2, ("x",), link)
    assert link.mail == [(new, mail(0)), (new, mail(1))]
    node.down("b", 2, "killed")
    assert seen(node, me) == [Up(address=X), Up(address=new), Down(address=new, reason="killed")]


def test_an_address_named_early_that_died_before_we_heard_of_it_is_reported() -> None:
    async def main() -> None:
        node, me, link = with_peer(window=1, hold_early=True)
        by_next_life, by_its_death = Address("x", 2), Address("y", 1)
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                for address in (by_next_life, by_its_death):
                    me.monitor(address)
                    me.post(address, mail(0))
                    nursery.start_soon(me.send, address, mail(1))
                await wait_all_tasks_blocked()
                node.up("b", 3, ("x",), link)
                node.down("c", 1, "killed", ("y",), suspects=("r1",))
        assert link.mail == []
        assert not me.is_alive(by_next_life)
        assert not me.is_alive(by_its_death)
        me.monitor(by_its_death)
        node.close()
        assert [message async for message in me.inbox] == [
            Up(address=X),
            Down(address=by_next_life, reason="not alive"),
            Up(address=Address("x", 3)),
            Down(address=by_its_death, reason="killed", suspects=("r1",)),
        ]

    trio.run(main, clock=MockClock(autojump_threshold=0))
