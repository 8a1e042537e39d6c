"""The law of blocks, and that the book refuses what would break it."""

import random

import pytest

from relay.kv.book import BlockBook


def test_every_block_is_in_exactly_one_state() -> None:
    book = BlockBook(10)
    running, leased = book.allocate(3), book.lease(4)
    assert running is not None
    assert leased is not None
    book.quarantine(leased[:2])
    book.adopt(leased[2:])
    counts = book.counts()
    assert (counts.free, counts.leased, counts.running, counts.quarantined) == (3, 0, 5, 2)
    assert counts.audit() == ""
    book.free(running + leased)
    assert book.counts().free == 10


def test_what_is_not_there_is_not_given() -> None:
    book = BlockBook(4)
    assert book.allocate(5) is None
    assert book.lease(5) is None
    assert book.counts().free == 4


def test_reserved_blocks_are_allocated_but_not_leased() -> None:
    book = BlockBook(4)
    book.reserve(3)
    assert book.lease(2) is None
    assert book.n_free() == 1
    assert book.allocate(2) is not None


def test_a_block_is_not_freed_twice() -> None:
    book = BlockBook(4)
    blocks = book.allocate(1)
    assert blocks is not None
    book.free(blocks)
    with pytest.raises(AssertionError, match="free already"):
        book.free(blocks)


def test_only_a_lease_can_be_adopted_or_quarantined() -> None:
    book = BlockBook(4)
    blocks = book.allocate(1)
    assert blocks is not None
    with pytest.raises(AssertionError, match="RUNNING, not LEASED"):
        book.adopt(blocks)
    with pytest.raises(AssertionError, match="RUNNING, not LEASED"):
        book.quarantine(blocks)


def test_a_lost_block_is_noticed() -> None:
    book = BlockBook(4)
    book._free.popleft()
    assert book.counts().audit() == "3 blocks accounted for, 4 in the pool"


def test_the_law_holds_under_random_use() -> None:
    draw = random.Random(1)
    book = BlockBook(50)
    held: list[tuple[str, list[int]]] = []
    for _ in range(5000):
        match draw.choice(("allocate", "lease", "adopt", "quarantine", "free", "free")):
            case "allocate" | "lease" as how:
                blocks = getattr(book, how)(draw.randint(0, 9))
                if blocks is not None:
                    held.append((how, blocks))
            case "adopt" | "quarantine" as how if held:
                state, blocks = held.pop(draw.randrange(len(held)))
                if state == "lease":
                    getattr(book, how)(blocks)
                held.append((how if state == "lease" else state, blocks))
            case "free" if held:
                book.free(held.pop(draw.randrange(len(held)))[1])
        counts = book.counts()
        assert counts.audit() == ""
        assert counts.free == 50 - sum(len(blocks) for _, blocks in held)
