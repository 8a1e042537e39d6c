"""What a step takes of the waiting prompts."""

from relay.policy.batching import StepClock, plan_chunks


def test_prompts_are_taken_in_order_and_the_last_gets_what_is_left() -> None:
    assert plan_chunks([20, 100, 5], 0, 48, 16, 512) == [(0, 20), (1, 28)]


def test_the_rest_of_a_decode_tile_is_used() -> None:
    assert plan_chunks([100], 4, 16, 16, 512) == [(0, 12)]


def test_a_full_decode_batch_does_not_starve_prompts() -> None:
    assert plan_chunks([100], 16, 16, 16, 512) == [(0, 16)]
    assert plan_chunks([100], 15, 16, 16, 512) == [(0, 17)]


def test_nothing_waiting_takes_nothing() -> None:
    assert plan_chunks([], 7, 16, 16, 512) == []


def test_the_cap_on_chunk_tokens_holds() -> None:
    assert plan_chunks([100, 100], 0, 256, 16, 40) == [(0, 40)]


def test_the_clock_sizes_steps_by_what_tiles_cost() -> None:
    clock = StepClock(16, 50.0, 10.0)
    assert clock.budget_rows() == 80
    for _ in range(200):
        clock.ran(10, 0, 25.0)
        clock.ran(32, 0, 50.0)
    assert clock.budget_rows() == 32
    assert round(clock.predict_ms(17, 0)) == 50
    assert StepClock(16, 50.0, 400.0).budget_rows() == 16


def test_a_step_that_holds_up_no_stream_may_be_longer() -> None:
    clock = StepClock(16, 50.0, 10.0, max_prefill_step_ms=300.0)
    assert (clock.budget_rows(), clock.budget_rows(alone=True)) == (80, 480)
    assert StepClock(16, 50.0, 10.0).budget_rows(alone=True) == 80


def test_what_a_step_costs_whatever_its_rows_is_learnt_apart() -> None:
    """Decode waits for the weights: 4 ms for one row, and 0.5 ms for each of many."""
    clock = StepClock(1, 50.0, 1.0, 1.0)
    for _ in range(300):
        clock.ran(1, 0, 4.5)
        clock.ran(90, 0, 49.0)
    assert round(clock.predict_ms(1, 0), 1) == 4.5
    assert round(clock.predict_ms(90, 0)) == 49
    assert 80 <= clock.budget_rows() <= 95


def test_without_tiles_a_full_decode_batch_still_leaves_prompts_some_rows() -> None:
    assert plan_chunks([100], 64, 60, 1, 512) == [(0, 8)]


def test_the_further_into_a_prompt_the_smaller_its_chunks() -> None:
    """Attention looks back at everything before it, and a step that ignored that would be as much longer than it was asked to be."""
    clock = StepClock(16, 50.0, 5.0, 0.0, kv_ms=0.001)

    def costs(n_before: int) -> float:
        n_rows = clock.budget_rows(n_before)
        return clock.predict_ms(n_rows, sum(range(n_before + 1, n_before + n_rows + 1)))

    assert clock.budget_rows(0) > clock.budget_rows(500) > clock.budget_rows(2000) >= 16
    assert 40 < costs(0) < 52
    assert 30 < costs(500) < 52
    for _ in range(300):
        clock.ran(32, 32 * 500, 2 * 5.0 + 32 * 500 * 0.001)  # its own part is known, and changes nothing of the others'
    assert clock.budget_rows(0) > 100


def test_attention_that_was_measured_too_dear_is_learnt_to_be_cheaper() -> None:
    """A step of few rows may wait for one thread where many rows keep all busy: then what it says of attention is far too much."""
    clock = StepClock(16, 40.0, 0.1, 7.9, kv_ms=6e-5)
    before = clock.budget_rows(32_000)
    for _ in range(60):
        n_rows = min(clock.budget_rows(32_000), 512)
        n_kv_tokens = n_rows * 32_000
        clock.ran(n_rows, n_kv_tokens, 8.0 + 0.005 * n_rows + 2e-6 * n_kv_tokens)
    assert before <= 32
    assert clock.budget_rows(32_000) > 200
