"""The law of blocks, and that the book refuses what would break it."""

import random

import pytest

from relay.kv.book import BlockBook
from relay.kv.prefix import chain, namespace


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
    with pytest.raises(AssertionError, match="FREE already"):
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


ROOT = namespace("m")
TOKENS = list(range(80))
KEYS = list(chain(ROOT, TOKENS, 16))


def with_prefix(book: BlockBook, n: int) -> list[int]:
    """Allocate and publish the first `n` blocks of TOKENS."""
    blocks = book.allocate(n)
    assert blocks is not None
    for i, block in enumerate(blocks):
        book.publish(block, KEYS[i], tuple(TOKENS[16 * i : 16 * i + 16]))
    return blocks


def test_a_published_prefix_is_shared_while_it_runs_and_after() -> None:
    book = BlockBook(8)
    first = with_prefix(book, 3)
    second = book.match(KEYS, TOKENS)
    assert second == first
    book.free(first)
    assert book.counts().running == 3
    book.free(second)
    assert (book.counts().running, book.counts().cached) == (0, 3)
    assert book.match(KEYS[:2], TOKENS) == first[:2]
    assert book.counts().audit() == ""


def test_tokens_decide_not_the_hash() -> None:
    """openvino.genai#3722: with a hash that always collides there is a miss, never a wrong hit."""
    book = BlockBook(4)
    blocks = book.allocate(1)
    assert blocks is not None
    book.publish(blocks[0], b"same", (1,) * 16)
    assert book.match([b"same"], [2] * 16) == []
    assert book.match([b"same"], [1] * 16) == blocks


def test_namespaces_never_meet() -> None:
    """vllm#44701, sglang#24638: a salt equal to a model's name, or to anything else inside, shares nothing."""
    roots = [namespace("m"), namespace("m", "m"), namespace("", "m"), namespace("m", "salt"), namespace("ms", "alt")]
    assert len({next(chain(root, TOKENS, 16)) for root in roots}) == len(roots)


def test_the_least_recently_used_end_of_a_prefix_goes_first() -> None:
    book = BlockBook(4)
    blocks = with_prefix(book, 3)
    book.free(blocks)
    taken = book.allocate(2)
    assert taken is not None
    assert taken[1] == blocks[2]
    assert book.match(KEYS, TOKENS) == blocks[:2]


def test_cached_blocks_are_given_when_nothing_else_is_left() -> None:
    book = BlockBook(3)
    book.free(with_prefix(book, 3))
    assert book.n_free() == 3
    assert book.lease(3) is not None
    assert book.match(KEYS, TOKENS) == []


def test_equal_content_is_published_once() -> None:
    book = BlockBook(4)
    first, second = with_prefix(book, 1), with_prefix(book, 1)
    book.free(second)
    assert book.counts().free == 3
    assert book.match(KEYS, TOKENS) == first


def test_without_caching_nothing_stays() -> None:
    book = BlockBook(2, caching=False)
    book.free(with_prefix(book, 2))
    assert book.counts().free == 2


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


def test_a_key_that_came_and_went_between_two_tellings_is_told_as_gone() -> None:
    """And one that went and came as here: the last word counts. (simulation, seed 85)"""
    book = BlockBook(1)
    (key,) = chain(namespace("m"), [1, 2], 2)
    (other,) = chain(namespace("m"), [3, 4], 2)

    def hold(what: bytes, tokens: tuple[int, ...]) -> None:
        blocks = book.allocate(1)
        assert blocks is not None
        book.publish(blocks[0], what, tokens)
        book.free(blocks)

    hold(key, (1, 2))
    hold(other, (3, 4))
    changes = book.take_changes()
    assert (changes.added, changes.removed) == ([other], [key])
    hold(key, (1, 2))
    hold(other, (3, 4))
    changes = book.take_changes()
    assert (changes.added, changes.removed) == ([other], [key])
