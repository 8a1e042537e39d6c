"""What the router does with deaths: an attempt is placed once, and a displaced one goes back to its gateway."""

from collections.abc import Callable
from typing import Literal

import trio
import trio.testing

from relay.actors.router import RouterActor
from relay.config import RouterConfig
from relay.messages import Address, Admit, Announced, Displaced, Down, Expect, Message, Sampling, Stopping
from relay.runtime.node import Node

GATEWAY = Address("gateway/0", 1)


class Road:
    """A link that keeps what it should carry."""

    def __init__(self) -> None:
        self.sent: list[Message] = []

    def deliver(self, to: Address, body: Message) -> None:
        self.sent.append(body)

    def credit(self, to: Address, n: int) -> None:
        pass


def routed(scenario: Callable[[Node, Road], list[Message]]) -> list[Message]:
    """What a router sends that takes the messages of a scenario, which may change who is up."""

    async def main() -> list[Message]:
        node, road = Node("router-0", 1), Road()
        context = node.open("router/0")
        node.up("router-0", 1, ("router/0",))
        for worker, actor in (("prefill-0", "prefill/0"), ("decode-0", "decode/0"), ("gateway-0", GATEWAY.actor)):
            node.up(worker, 1, (actor,), road)
        router = RouterActor(RouterConfig(), "m")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(router.run, context)
            for message in (announced("prefill/0", "prefill-0"), announced("decode/0", "decode-0"), *scenario(node, road)):
                node.delivered(("gateway-0", 1), context.address, message)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        return road.sent

    return trio.run(main)


def announced(actor: str, worker: str, epoch: int = 1) -> Announced:
    role: Literal["prefill", "decode"] = "prefill" if actor.startswith("prefill") else "decode"
    return Announced(
        address=Address(actor, epoch),
        role=role,
        worker=worker,
        n_blocks=1000,
        block_tokens=16,
        max_running=8,
        prefills=role == "prefill",
    )


def admit(*dead: Address) -> Admit:
    return Admit(
        request_id="r",
        attempt=1,
        tokens=tuple(range(40)),
        n_prompt=40,
        sampling=Sampling(),
        stopping=Stopping(max_tokens=4),
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
