"""Who waits in which order."""

from relay.messages import Address, Admit, Sampling, Stopping
from relay.policy.queue import Queued, WaitingLine


def queued(name: str, *, priority: int = 0, attempt: int = 1, declined: bool = False) -> Queued:
    admit = Admit(
        request_id=name,
        attempt=attempt,
        tokens=(1,),
        n_prompt=1,
        sampling=Sampling(),
        stopping=Stopping(max_tokens=1),
        gateway=Address("gateway/0", 1),
        priority=priority,
    )
    return Queued(admit, 0, declined)


def order(line: WaitingLine) -> list[str]:
    names = []
    while (first := line.first()) is not None:
        names.append(first.admit.request_id)
        line.remove((first.admit.request_id, first.admit.attempt))
    return names


def test_first_come_first_served() -> None:
    line = WaitingLine()
    for name in "abc":
        line.add(queued(name))
    assert order(line) == ["a", "b", "c"]


def test_a_lower_priority_number_goes_first() -> None:
    """vllm#9342: many of priority 0, then one of -10."""
    line = WaitingLine()
    for name in "abc":
        line.add(queued(name))
    line.add(queued("urgent", priority=-10))
    line.add(queued("later", priority=3))
    assert order(line) == ["urgent", "a", "b", "c", "later"]


def test_who_has_waited_once_goes_before_its_equals() -> None:
    line = WaitingLine()
    line.add(queued("a"))
    line.add(queued("again", attempt=2))
    line.add(queued("declined", declined=True))
    assert order(line) == ["again", "declined", "a"]


def test_what_is_removed_has_no_turn() -> None:
    line = WaitingLine()
    line.add(queued("a"))
    line.add(queued("b"))
    assert line.remove(("a", 1)) is not None
    assert line.remove(("a", 1)) is None
    assert ("b", 1) in line
    assert len(line) == 1
    line.add(queued("a"))
    assert order(line) == ["b", "a"]
