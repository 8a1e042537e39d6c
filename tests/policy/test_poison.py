"""What is the same request, and for how long it is remembered."""

from relay.messages import Sampling
from relay.policy.poison import PoisonMemory, digests


def test_the_same_request_is_known_again_whatever_its_seed() -> None:
    first = digests((1, 2, 3), Sampling(temperature=0.5, seed=1), -1)
    assert first == digests([1, 2, 3], Sampling(temperature=0.5, seed=2, choice=4), -1)
    for other in (digests((1, 2, 3), Sampling(temperature=0.6), -1), digests((1, 2, 3), Sampling(temperature=0.5), 5)):
        assert (other[0] == first[0], other[1] == first[1]) == (True, False)
    for other in (digests((1, 2, 4), Sampling(temperature=0.5, seed=1), -1), digests((1, 2), Sampling(temperature=0.5, seed=1), -1)):
        assert len({*first, *other}) == 4


def test_it_is_forgotten_when_its_time_is_over() -> None:
    memory = PoisonMemory()
    assert memory.is_empty(0)
    assert memory.add(b"a", 100)
    assert memory.holds(b"a", 99)
    assert not memory.holds(b"a", 100)
    assert not memory.is_empty(99)
    assert memory.is_empty(100)
    assert list(memory) == []


def test_only_a_later_end_is_news() -> None:
    memory = PoisonMemory()
    assert [memory.add(b"a", until) for until in (100, 100, 90, 110)] == [True, False, False, True]
    assert list(memory) == [(b"a", 110)]


def test_the_oldest_make_room() -> None:
    memory = PoisonMemory(most=2)
    for name in (b"a", b"b", b"a", b"c"):
        memory.add(name, 100 if name != b"a" or not list(memory) else 101)
    assert [name for name, _ in memory] == [b"a", b"c"]
