"""When a dead worker starts again, and when it dies too often."""

from relay.runtime.restart import RestartPolicy


def test_waits_double_up_to_the_longest_and_a_quiet_time_forgets_them() -> None:
    policy = RestartPolicy("a", max_restarts=3, within_s=10, first_s=0.1, most_s=0.3)
    assert [policy.died(t, "x") for t in (0, 1, 2)] == [0.1, 0.2, 0.3]
    assert policy.died(60, "x") == 0.1


def test_one_death_too_many_says_who_and_of_what() -> None:
    policy = RestartPolicy("decode-0", max_restarts=1, within_s=10, first_s=0.1, most_s=0.3)
    policy.died(0, "x")
    assert policy.too_many(0) is None
    policy.died(10, "ValueError: boom")
    assert "worker decode-0 died 2 times in 10 s, the last time of: ValueError: boom" in str(policy.too_many(10))
    assert policy.too_many(11) is None, "a quiet time forgets it"


def test_over_the_limit_the_waits_grow_from_the_longest_to_the_window() -> None:
    policy = RestartPolicy("a", max_restarts=1, within_s=16, first_s=0.1, most_s=4)
    assert [policy.died(t, "x") for t in (0, 1, 2, 3, 4, 5)] == [0.1, 4, 8, 16, 16, 16]
    assert policy.died(60, "x") == 0.1


def test_a_wait_without_a_longest_one_stays_without() -> None:
    policy = RestartPolicy("a", max_restarts=0, within_s=16, first_s=0, most_s=0)
    assert [policy.died(t, "x") for t in range(3)] == [0, 0, 0]
