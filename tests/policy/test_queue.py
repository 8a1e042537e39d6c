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
        line.place(first.key)
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


def test_requests_take_turns_whatever_they_have() -> None:
    """One of many sequences does not keep the others waiting until all of them have run."""
    line = WaitingLine()
    for i in range(800):
        line.add(queued(f"many/{i}"))
    line.add(queued("one"))
    for i in range(3):
        line.add(queued(f"few/{i}"))
    assert order(line)[:7] == ["many/0", "one", "few/0", "many/1", "few/1", "many/2", "few/2"]


def test_a_request_of_many_is_not_overtaken_for_ever() -> None:
    """Whenever one gets a place another of a single sequence comes, and there are always some of these waiting."""
    line = WaitingLine()
    for name in ("many/0", "many/1", "many/2", "many/3", "a", "b"):
        line.add(queued(name))
    seen = []
    for i in range(20):
        first = line.first()
        assert first is not None
        seen.append(first.admit.request_id)
        line.place(first.key)
        line.add(queued(f"new{i}"))
    assert [name for name in seen if name.startswith("many")] == ["many/0", "many/1", "many/2", "many/3"]


def test_requests_are_counted_and_not_their_sequences() -> None:
    line = WaitingLine()
    for name in ("r1/0", "r1/1", "r2"):
        line.add(queued(name))
    assert line.n_requests == 2
    line.remove(("r1/0", 1))
    assert line.n_requests == 2
    line.remove(("r1/1", 1))
    assert line.n_requests == 1


def test_who_is_set_aside_keeps_its_turn_for_later() -> None:
    line = WaitingLine()
    for name in "abc":
        line.add(queued(name))
    line.set_aside(("a", 1))
    assert ("a", 1) in line
    assert line.first() == queued("b")
    line.bring_back()
    assert order(line) == ["a", "b", "c"]
