"""The ledger closes: its spans sum to the wall time, whatever happened in which order."""

import random

from relay.ledger.ledger import Ledger
from relay.ledger.spans import Span


def test_spans_sum_to_the_wall_time() -> None:
    ledger = Ledger(1000)
    ledger.close(Span.GATEWAY_BODY, 1500)
    ledger.close(Span.GATEWAY_TOKENIZE, 1700)
    ledger.fold(((Span.HOP, 1800), (Span.PREFILL_FLOOR, 2500)))
    ledger.close(Span.UNACCOUNTED, 2500)
    assert ledger.spans() == {"gateway.body": 500, "gateway.tokenize": 200, "hop": 100, "prefill.floor": 700, "unaccounted": 0}
    assert sum(ledger.spans().values()) == ledger.wall_ns == 1500


def test_what_ran_beside_the_path_counts_only_where_it_was_waited_for() -> None:
    ledger = Ledger(0)
    ledger.close(Span.OUT_WRITE_BLOCKED, 100)
    ledger.fold(((Span.DECODE_HOST, 20), (Span.DECODE_FLOOR, 90), (Span.DECODE_EXCESS, 130)))
    assert ledger[Span.DECODE_HOST] == ledger[Span.DECODE_FLOOR] == 0
    assert ledger[Span.DECODE_EXCESS] == 30
    assert ledger.wall_ns == 130


def test_a_stamp_before_the_cursor_is_counted_and_moves_nothing() -> None:
    ledger = Ledger(100)
    ledger.close(Span.HOP, 200)
    ledger.close(Span.OUT_HANDOFF, 150)
    assert ledger.violations == 1
    assert ledger.cursor_ns == 200
    assert ledger[Span.OUT_HANDOFF] == 0


def test_the_first_byte_cuts_the_ledger_once() -> None:
    ledger = Ledger(0)
    ledger.close(Span.PREFILL_FLOOR, 70)
    ledger.first_byte()
    ledger.close(Span.DECODE_FLOOR, 100)
    ledger.first_byte()
    assert ledger.ttft_spans() == {"prefill.floor": 70, "unaccounted": 0}
    assert ledger.first_byte_ns == 70


def test_random_lives_close() -> None:
    draw = random.Random(3)
    for _ in range(500):
        ledger, now = Ledger(0), 0
        for _ in range(draw.randint(0, 60)):
            now += draw.randint(0, 1000)
            if draw.random() < 0.5:
                stamps = sorted(draw.randint(max(0, now - 3000), now) for _ in range(draw.randint(0, 5)))
                ledger.fold(tuple((draw.randrange(len(Span)), stamp) for stamp in stamps))
            else:
                ledger.close(Span(draw.randrange(len(Span))), now)
        assert sum(ledger.spans().values()) == ledger.wall_ns
        assert ledger.violations == 0


def test_labels_are_the_published_ones() -> None:
    assert Span.PREFILL_QUEUE_BEHIND_PREFILL.label == "prefill.queue.behind_prefill"
    assert Span.OUT_WRITE_BLOCKED.label == "out.write_blocked"
    assert Span.RETRY_WASTED.label == "retry.wasted"
    assert Span.HOP.label == "hop"
    assert len({span.label for span in Span}) == len(Span)
