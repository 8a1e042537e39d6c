"""When a dead worker starts again, and when the server gives up."""

import pytest

from relay.errors import TooManyRestarts
from relay.runtime.restart import RestartPolicy


def test_waits_double_up_to_the_longest_and_a_quiet_time_forgets_them() -> None:
    policy = RestartPolicy("a", max_restarts=3, within_s=10, first_s=0.1, most_s=0.3)
    assert [policy.died(t, "x") for t in (0, 1, 2)] == [0.1, 0.2, 0.3]
    assert policy.died(60, "x") == 0.1


def test_one_death_too_many_says_who_and_of_what() -> None:
    policy = RestartPolicy("decode-0", max_restarts=1, within_s=10, first_s=0.1, most_s=0.3)
    policy.died(0, "x")
    with pytest.raises(TooManyRestarts, match="worker decode-0 died 2 times in 10 s, the last time of: ValueError: boom"):
        policy.died(10, "ValueError: boom")
