"""What a prompt that waits for a place costs the router."""

from collections.abc import Iterator, Sequence

import pytest

from relay.actors import router as module
from relay.kv.prefix import BlockKey, chain
from relay.messages import Address, Admit, Expect, Left, Message, Sampling, Stopping
from relay.runtime.node import Node
from tests.actors.test_router_deaths import GATEWAY, Road, routed

N_MESSAGES = 50


def admit(name: str, n_tokens: int) -> Admit:
    return Admit(
        request_id=name,
        attempt=1,
        tokens=tuple(range(n_tokens)),
        n_prompt=n_tokens,
        sampling=Sampling(),
        stopping=Stopping(max_tokens=1),
        gateway=GATEWAY,
    )


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
        return [admit("first", 9600), admit("second", 9616), *others, gone]

    sent = routed(scenario)
    assert [message.admit.request_id for message in sent if isinstance(message, Expect)] == ["first", "second"]
    assert n_hashed == 599 + 600
