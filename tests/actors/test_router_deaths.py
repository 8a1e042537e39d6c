"""What the router does with deaths: an attempt is placed once, and a displaced one goes back to its gateway."""

from collections.abc import Callable
from typing import Literal

import msgspec
import pytest
import trio
import trio.testing

from relay.actors.router import RouterActor
from relay.config import Role, RouterConfig
from relay.messages import Address, Admit, Announced, Displaced, Down, Expect, Message, Refused, Sampling, Stopping, Withdrawn
from relay.runtime.node import Node
from tests.actors.road import Road

GATEWAY = Address("gateway/0", 1)


def routed(scenario: Callable[[Node, Road], list[Message]], room: dict[Role, int] | None = None) -> list[Message]:
    """What a router sends that takes the messages of a scenario, which may change who is up. `room`: what is planned."""

    async def main() -> list[Message]:
        node, road = Node("router-0", 1), Road()
        context = node.open("router/0")
        node.up("router-0", 1, ("router/0",))
        for worker, actor in (("prefill-0", "prefill/0"), ("decode-0", "decode/0"), ("large-0", "decode/1"), ("gateway-0", GATEWAY.actor)):
            node.up(worker, 1, (actor,), road)
        router = RouterActor(RouterConfig(), "m", room=room)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(router.run, context)
            for message in (announced("prefill/0", "prefill-0", n_blocks=4000), announced("decode/0", "decode-0"), *scenario(node, road)):
                node.delivered(("gateway-0", 1), context.address, message)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        return road.sent

    return trio.run(main)


def announced(actor: str, worker: str, epoch: int = 1, n_blocks: int = 1000) -> Announced:
    role: Literal["prefill", "decode"] = "prefill" if actor.startswith("prefill") else "decode"
    return Announced(
        address=Address(actor, epoch),
        role=role,
        worker=worker,
        n_blocks=n_blocks,
        block_tokens=16,
        max_running=8,
        prefills=role == "prefill",
    )


def admit(*dead: Address, name: str = "r", n_tokens: int = 40, max_tokens: int = 4) -> Admit:
    return Admit(
        request_id=name,
        attempt=1,
        tokens=tuple(range(n_tokens)),
        n_prompt=n_tokens,
        sampling=Sampling(),
        stopping=Stopping(max_tokens=max_tokens),
        gateway=GATEWAY,
        dead=dead,
    )


def test_an_attempt_that_was_displaced_is_not_placed_again() -> None:
    """Its gateway, which hears of another death meanwhile, repeats it while word of the first is under way."""

    def scenario(node: Node, road: Road) -> list[Message]:
        node.up("decode-0", 2, ("decode/0",), road)
        died = Down(address=Address("decode/0", 1), reason="SIGSEGV", suspects=("r",))
        return [admit(), died, announced("decode/0", "decode-0", 2), admit(Address("decode/1", 9))]

    sent = routed(scenario)
    assert [type(message) for message in sent if isinstance(message, Expect | Displaced)] == [Expect, Displaced]


LARGE = Address("decode/1", 1)


def fate(sent: list[Message]) -> list[tuple[str, str]]:
    """What became of each request, in order."""
    fates = []
    for message in sent:
        if isinstance(message, Expect):
            fates.append(("placed", message.admit.request_id))
        elif isinstance(message, Refused):
            fates.append((message.code, message.request_id))
    return fates


@pytest.mark.parametrize("ends", [Down(address=LARGE, reason="SIGKILL"), Withdrawn(address=LARGE)])
def test_what_only_an_absent_worker_has_room_for_waits_for_its_next_life(ends: Message) -> None:
    """It died or is being drained; who fits elsewhere does not wait with it."""

    def scenario(node: Node, road: Road) -> list[Message]:
        node.up("large-0", 2, ("decode/1",), road)
        back = announced("decode/1", "large-0", 2, n_blocks=4000)
        return [announced("decode/1", "large-0", n_blocks=4000), ends, admit(name="long", n_tokens=20_000), admit(name="short"), back]

    assert fate(routed(scenario)) == [("placed", "short"), ("placed", "long")]


def test_what_the_plan_has_room_for_waits_for_a_worker_that_never_was_up() -> None:
    """A router that has just started knows the large one from the plan only."""

    def scenario(node: Node, road: Road) -> list[Message]:
        return [admit(name="long", n_tokens=20_000), admit(name="endless", n_tokens=70_000), admit(name="short")]

    room: dict[Role, int] = {"decode": 64_000, "prefill": 64_000}
    assert fate(routed(scenario, room)) == [("context_length_exceeded", "endless"), ("placed", "short")]


def test_no_request_goes_where_it_could_not_grow_to_its_end() -> None:
    """The small pool has more room for its first tokens, and would never have it for the last."""

    def scenario(node: Node, road: Road) -> list[Message]:
        long = msgspec.structs.replace(admit(name="long"), stopping=Stopping(max_tokens=30_000))
        return [announced("decode/1", "large-0", n_blocks=4000), *(admit(name=f"other{i}", n_tokens=12_000) for i in range(3)), long]

    expected = [message for message in routed(scenario) if isinstance(message, Expect)]
    assert [message.decision.decode[0].address for message in expected if message.admit.request_id == "long"] == [LARGE]
