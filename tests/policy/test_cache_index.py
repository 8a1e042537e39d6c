"""What the router believes of a cache."""

from relay.kv.book import BlockBook
from relay.kv.prefix import chain, namespace
from relay.policy.cache_index import CacheIndex, hints, news

ROOT = namespace("m")
TOKENS = list(range(64))
KEYS = list(chain(ROOT, TOKENS, 16))


def test_the_longest_known_run_from_the_start_counts() -> None:
    index = CacheIndex(hints([KEYS[0], KEYS[1], KEYS[3]]))
    assert index.n_blocks(KEYS) == 2
    index.change(hints([KEYS[2]]), b"")
    assert index.n_blocks(KEYS) == 4
    index.change(b"", hints([KEYS[0]]))
    assert index.n_blocks(KEYS) == 0
    assert len(index) == 3


def test_a_workers_news_keep_the_index_true() -> None:
    book, index = BlockBook(3), CacheIndex()
    blocks = book.allocate(3)
    assert blocks is not None
    for i, block in enumerate(blocks):
        book.publish(block, KEYS[i], tuple(TOKENS[16 * i : 16 * i + 16]))
    changes = news("w", 1, book)
    assert changes is not None
    index.change(changes.added, changes.removed)
    assert index.n_blocks(KEYS) == 3
    assert news("w", 1, book) is None
    book.free(blocks)
    book.allocate(1)  # evicts the end of the prefix
    changes = news("w", 1, book)
    assert changes is not None
    index.change(changes.added, changes.removed)
    assert index.n_blocks(KEYS) == 2


def test_a_snapshot_says_all_and_what_was_pending_is_not_said_twice() -> None:
    book = BlockBook(1)
    blocks = book.allocate(1)
    assert blocks is not None
    book.publish(blocks[0], KEYS[0], tuple(TOKENS[:16]))
    assert CacheIndex(hints(book.published_keys())).n_blocks(KEYS) == 1
    assert news("w", 1, book) is None
