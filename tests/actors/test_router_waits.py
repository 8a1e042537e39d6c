"""What a prompt that waits for a place costs the router, and those behind it."""

from collections.abc import Iterator, Sequence

import msgspec
import pytest
import trio
import trio.testing

from relay import clock
from relay.actors import router as module
from relay.config import RouterConfig
from relay.kv.prefix import BlockKey, chain
from relay.messages import Address, Admit, Expect, Left, Message
from relay.runtime.node import Node
from tests.actors.road import Road
from tests.actors.test_router_deaths import GATEWAY, admit, announced, fate, routed

N_MESSAGES = 50


def brief(name: str, n_tokens: int) -> Admit:
    return admit(name=name, n_tokens=n_tokens, max_tokens=1)


def test_a_prompt_that_waits_is_hashed_once_and_not_with_every_message(monkeypatch: pytest.MonkeyPatch) -> None:
    n_hashed = 0

    def counted(root: BlockKey, tokens: Sequence[int], block_tokens: int) -> Iterator[BlockKey]:
        nonlocal n_hashed
        for key in chain(root, tokens, block_tokens):
            n_hashed += 1
            yield key

    monkeypatch.setattr(module, "chain", counted)

    def scenario(node: Node, road: Road) -> list[Message]:
        """Both need more than half of the only pool; the second is looked at again when others leave, and goes when the first does."""
        others = [Left(request_id=f"other-{i}", attempt=1, address=Address("decode/0", 1)) for i in range(N_MESSAGES)]
        gone = Left(request_id="first", attempt=1, address=Address("decode/0", 1))
        return [brief("first", 9600), brief("second", 9616), *others, gone]

    sent = routed(scenario)
    assert [message.admit.request_id for message in sent if isinstance(message, Expect)] == ["first", "second"]
    assert n_hashed == 599 + 600


def test_who_waits_behind_a_request_whose_time_runs_out_has_its_turn_at_once() -> None:
    """Not when the router looks again a quarter of a second later."""

    async def main() -> list[tuple[str, str]]:
        node, road = Node("router-0", 1), Road()
        context = node.open("router/0")
        node.up("router-0", 1, ("router/0",))
        for worker, actor in (("prefill-0", "prefill/0"), ("decode-0", "decode/0"), ("gateway-0", GATEWAY.actor)):
            node.up(worker, 1, (actor,), road)
        in_time = clock.now_ns() + 100_000_000
        late = msgspec.structs.replace(brief("late", 9616), deadline_ns=in_time)
        workers = announced("prefill/0", "prefill-0"), announced("decode/0", "decode-0")
        router = module.RouterActor(RouterConfig(), "m")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(router.run, context)
            for message in (*workers, brief("first", 9600), late, brief("behind", 40)):
                node.delivered(("gateway-0", 1), context.address, message)
            await trio.sleep(0.3)  # it looks at the clock every 0.25 s
            nursery.cancel_scope.cancel()
        return fate(road.sent)

    with clock.replaced(lambda: int(trio.current_time() * 1e9)):
        fates = trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert fates == [("placed", "first"), ("deadline_exceeded", "late"), ("placed", "behind")]
