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
    ledger.close(Span.GATEWAY_TOKENIZE, 100)
    ledger.fold(((Span.DECODE_HOST, 20), (Span.DECODE_FLOOR, 90), (Span.DECODE_EXCESS, 130)))
    assert ledger[Span.DECODE_HOST] == ledger[Span.DECODE_FLOOR] == 0
    assert ledger[Span.DECODE_EXCESS] == 30
    assert ledger.wall_ns == 130


def arrives(ledger: Ledger, began: int, ended: int, now: int) -> None:
    """A token of a step."""
    ledger.fold(((Span.DECODE_HOST, began), (Span.DECODE_FLOOR, ended)))
    ledger.close(Span.HOP, now)


def test_a_tokens_journey_beside_the_next_step_is_that_steps() -> None:
    """Steps of 100, each token 70 on its way: nothing waits but for the last one's."""
    ledger = Ledger(0)
    for n in range(10):
        arrives(ledger, 100 * n, 100 * n + 100, 100 * n + 170)
    assert ledger.spans() == {"decode.floor": 1000, "hop": 70, "unaccounted": 0}


def test_a_reader_that_keeps_up_costs_nothing_but_at_the_end() -> None:
    ledger = Ledger(0)
    for n in range(10):
        arrives(ledger, 100 * n, 100 * n + 100, 100 * n + 110)
        ledger.close(Span.OUT_HANDOFF, 100 * n + 120)
        ledger.close(Span.OUT_DETOKENIZE, 100 * n + 130)
        ledger.first_byte()
        ledger.close(Span.OUT_WRITE_BLOCKED, 100 * n + 160)
    journey = {"hop": 10, "out.detokenize": 10, "out.handoff": 10}
    assert ledger.spans() == {"decode.floor": 1000, **journey, "out.write_blocked": 30, "unaccounted": 0}
    assert ledger.ttft_spans() == {"decode.floor": 100, **journey, "unaccounted": 0}
    assert ledger.first_byte_ns == 130


def test_a_reader_that_everything_waits_for_in_the_end_is_named() -> None:
    ledger = Ledger(0)
    arrives(ledger, 0, 100, 110)
    for n in range(1, 10):  # while the first token's write is blocked
        arrives(ledger, 100 * n, 100 * n + 100, 100 * n + 110)
    ledger.close(Span.OUT_WRITE_BLOCKED, 9000)
    assert ledger.spans() == {"decode.floor": 1000, "hop": 10, "out.write_blocked": 9000 - 1010, "unaccounted": 0}


def test_what_the_next_step_waited_for_before_it_began_is_not_its_predecessors_hop() -> None:
    """Preempted, or behind a host that was busy: a faster hop would have saved nothing."""
    ledger = Ledger(0)
    arrives(ledger, 0, 100, 150)
    ledger.fold(((Span.DECODE_PREEMPTED, 900),))
    arrives(ledger, 950, 1000, 1010)
    assert ledger.spans() == {"hop": 10, "decode.host": 50, "decode.floor": 150, "decode.preempted": 800, "unaccounted": 0}


def test_a_step_that_was_over_before_the_token_of_the_last_one_came() -> None:
    ledger = Ledger(0)
    arrives(ledger, 0, 100, 500)
    arrives(ledger, 100, 200, 500)  # both in one frame
    assert ledger.spans() == {"decode.floor": 200, "hop": 300, "unaccounted": 0}


def test_a_trail_that_says_nothing_new_takes_nothing_back() -> None:
    """The first token comes by two roads; another choice is in the same step; a log that is told again has no trail."""
    ledger = Ledger(0)
    arrives(ledger, 0, 100, 120)
    ledger.close(Span.OUT_HANDOFF, 150)
    arrives(ledger, 0, 100, 160)
    ledger.fold(())
    ledger.close(Span.HOP, 200)
    assert ledger.spans() == {"decode.floor": 100, "hop": 70, "out.handoff": 30, "unaccounted": 0}


def test_a_dead_attempt_is_wasted_from_its_last_steps_end_on() -> None:
    ledger = Ledger(0)
    arrives(ledger, 0, 100, 120)
    ledger.close(Span.OUT_HANDOFF, 150)
    ledger.lose(1000)
    ledger.lose(1000)  # another choice of the same worker
    arrives(ledger, 1200, 1300, 1310)
    assert ledger.spans() == {"decode.floor": 200, "decode.host": 200, "retry.wasted": 900, "hop": 10, "unaccounted": 0}


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
                ledger.close(Span.HOP, now)
            elif draw.random() < 0.1:
                ledger.lose(now)
            else:
                ledger.close(Span(draw.randrange(len(Span))), now)
                if draw.random() < 0.2:
                    ledger.first_byte()
            assert sum(ledger.spans().values()) == ledger.wall_ns == now - ledger.start_ns
        assert ledger.ttft_slots is None or sum(ledger.ttft_spans().values()) == ledger.first_byte_ns
        assert sum(ledger.spans().values()) == ledger.wall_ns
        assert ledger.violations == 0


def test_labels_are_the_published_ones() -> None:
    assert Span.PREFILL_QUEUE_BEHIND_PREFILL.label == "prefill.queue.behind_prefill"
    assert Span.OUT_WRITE_BLOCKED.label == "out.write_blocked"
    assert Span.RETRY_WASTED.label == "retry.wasted"
    assert Span.HOP.label == "hop"
    assert len({span.label for span in Span}) == len(Span)
