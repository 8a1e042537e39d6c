"""Limiter and quotas over real nodes: one limit for two gateways, deaths on either side, and who waits for whom. On a virtual clock."""

from collections.abc import Awaitable, Callable

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from relay.actors.limiter import LimiterActor
from relay.actors.quota import QuotaActor
from relay.errors import Overloaded
from relay.messages import Address, Denied, Granted, Limits, Message
from relay.runtime.node import Node

QUOTAS = ("quota/0", "quota/1")


class Wire:
    """A link that is never cut, to a node in the same process."""

    def __init__(self, sender: Node, receiver: Node) -> None:
        self._origin, self._receiver = (sender.worker, sender.epoch), receiver

    def deliver(self, to: Address, body: Message) -> None:
        self._receiver.delivered(self._origin, to, body)

    def credit(self, to: Address, n: int) -> None:
        self._receiver.credited(to, n)


class World:
    """Workers by name, each with one actor; the supervisor's word is spoken here."""

    def __init__(self, nursery: trio.Nursery, window: int = 4096) -> None:
        self._nursery, self._window = nursery, window
        self._live: dict[str, tuple[Node, str, trio.CancelScope]] = {}
        self.quotas: dict[str, QuotaActor] = {}

    def start(self, worker: str, epoch: int = 1) -> None:
        node = Node(worker, epoch, window=self._window)
        limiter = worker == "router"
        actor: LimiterActor | QuotaActor = LimiterActor(QUOTAS) if limiter else QuotaActor()
        name = "limiter/0" if limiter else worker
        context = node.open(name)
        for other, (theirs, their_name, _) in self._live.items():
            node.up(other, theirs.epoch, (their_name,), Wire(node, theirs))
            theirs.up(worker, epoch, (name,), Wire(theirs, node))
        if isinstance(actor, QuotaActor):
            self.quotas[worker] = actor
        scope = trio.CancelScope()
        self._live[worker] = node, name, scope

        async def live() -> None:
            with scope:
                await actor.run(context)

        self._nursery.start_soon(live)

    def kill(self, worker: str) -> None:
        node, name, scope = self._live.pop(worker)
        scope.cancel()
        for theirs, _, _ in self._live.values():
            theirs.down(worker, node.epoch, "SIGKILL", (name,))

    async def ask(self, worker: str, request_id: str, limits: Limits, n_tokens: int = 10) -> Granted | Denied:
        return await self.quotas[worker].reserve(request_id, "k", limits, 4, n_tokens)


def simulate(scenario: Callable[[World], Awaitable[None]], window: int = 4096, workers: tuple[str, ...] = ("router", *QUOTAS)) -> None:
    async def main() -> None:
        with trio.fail_after(600):
            async with trio.open_nursery() as nursery:
                world = World(nursery, window)
                for worker in workers:
                    world.start(worker)
                await wait_all_tasks_blocked()
                await scenario(world)
                nursery.cancel_scope.cancel()

    trio.run(main, clock=MockClock(autojump_threshold=0))


@pytest.mark.parametrize("window", [2, 4096])
def test_two_gateways_at_once_never_get_more_than_the_limit(window: int) -> None:
    async def scenario(world: World) -> None:
        answers: list[Granted | Denied | Overloaded] = []

        async def ask(i: int) -> None:
            try:
                answers.append(await world.ask(QUOTAS[i % 2], str(i), Limits(requests=10)))
            except Overloaded as error:
                answers.append(error)

        async with trio.open_nursery() as nursery:
            for i in range(40):
                nursery.start_soon(ask, i)
        granted = sum(isinstance(answer, Granted) for answer in answers)
        assert len(answers) == 40
        assert granted == 10 if window > 40 else granted <= 10

    simulate(scenario, window)


def test_places_come_back_at_the_end_and_at_a_gateways_death() -> None:
    async def scenario(world: World) -> None:
        limits = Limits(concurrency=2)
        assert isinstance(await world.ask("quota/0", "a", limits), Granted)
        assert isinstance(await world.ask("quota/1", "b", limits), Granted)
        assert isinstance(await world.ask("quota/1", "c", limits), Denied)
        world.quotas["quota/1"].settle("b", 5)
        assert isinstance(await world.ask("quota/1", "d", limits), Granted)
        assert isinstance(await world.ask("quota/1", "e", limits), Denied)
        world.kill("quota/0")
        assert isinstance(await world.ask("quota/1", "f", limits), Granted)
        assert isinstance(await world.ask("quota/1", "g", limits), Denied)

    simulate(scenario)


def test_a_new_limiter_forgets_nothing_that_a_living_gateway_knows() -> None:
    async def scenario(world: World) -> None:
        limits = Limits(requests=4, tokens=100, concurrency=2)
        for worker, name in (("quota/0", "a"), ("quota/1", "b")):
            assert isinstance(await world.ask(worker, name, limits, 30), Granted)
        world.quotas["quota/0"].settle("a", 20)
        world.kill("router")
        world.quotas["quota/1"].settle("b", 30)
        world.start("router", epoch=2)
        granted = await world.ask("quota/0", "c", limits, 25)
        assert granted.standing.requests_left == 1
        assert granted.standing.tokens_left == 25
        assert isinstance(await world.ask("quota/1", "d", limits, 26), Denied)
        assert isinstance(await world.ask("quota/1", "d", limits, 25), Granted)
        denied = await world.ask("quota/0", "e", limits, 0)
        assert isinstance(denied, Denied)
        assert denied.limit == "requests"

    simulate(scenario)


def test_who_asks_while_there_is_no_limiter_waits_for_the_next() -> None:
    async def scenario(world: World) -> None:
        world.kill("router")
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                assert isinstance(await world.ask("quota/0", "a", Limits(requests=1)), Granted)

            nursery.start_soon(ask)
            await wait_all_tasks_blocked()
            world.start("router", epoch=2)
        assert isinstance(await world.ask("quota/1", "b", Limits(requests=1)), Denied)

    simulate(scenario)


def test_who_asks_for_too_long_is_refused_and_holds_nothing() -> None:
    async def scenario(world: World) -> None:
        world.kill("router")
        with pytest.raises(Overloaded):
            await world.ask("quota/0", "a", Limits(concurrency=1))
        world.start("router", epoch=2)
        assert isinstance(await world.ask("quota/0", "b", Limits(concurrency=1)), Granted)

    simulate(scenario)


def test_a_new_limiter_does_not_wait_for_a_dead_gateway_for_ever() -> None:
    async def scenario(world: World) -> None:
        await world.ask("quota/1", "a", Limits(requests=2))
        world.kill("router")
        world.kill("quota/1")
        world.start("router", epoch=2)
        before = trio.current_time()
        assert isinstance(await world.ask("quota/0", "b", Limits(requests=2)), Granted)
        assert trio.current_time() - before == pytest.approx(1.0)

    simulate(scenario)


def test_in_its_first_life_a_limiter_waits_for_nobody() -> None:
    async def scenario(world: World) -> None:
        before = trio.current_time()
        assert isinstance(await world.ask("quota/0", "a", Limits(requests=1)), Granted)
        assert trio.current_time() == before

    simulate(scenario, workers=("router", "quota/0"))


def test_a_cancelled_request_holds_nothing() -> None:
    """Whether its leave was under way, had come, or came in the very turn of the loop (which trio orders by chance: so many times)."""

    async def scenario(world: World) -> None:
        for turns in range(80):
            name, answered = f"a{turns}", False

            async def ask(name: str = name) -> None:
                nonlocal answered
                await world.ask("quota/0", name, Limits(concurrency=1))
                answered = True

            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask)
                for _ in range(turns % 8):
                    await trio.lowlevel.checkpoint()
                nursery.cancel_scope.cancel()
            await wait_all_tasks_blocked()
            if answered:
                world.quotas["quota/0"].settle(name, 0)
            assert isinstance(await world.ask("quota/1", f"b{turns}", Limits(concurrency=1)), Granted)
            world.quotas["quota/1"].settle(f"b{turns}", 0)

    simulate(scenario)
