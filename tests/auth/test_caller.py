"""What a key may ask for, and whose cached prefixes it finds."""

import pytest

from relay.auth.caller import ANYONE, Caller
from relay.errors import InvalidRequest


@pytest.mark.parametrize(
    ("caller", "best"),
    [(ANYONE, 0), (Caller(name="a"), 0), (Caller(name="a", best_priority=-3), -3), (Caller(name="a", best_priority=2), 2)],
)
def test_a_priority_is_bounded_by_the_key_or_else_for_everybody(caller: Caller, best: int) -> None:
    caller.check_priority(best, 0)
    with pytest.raises(InvalidRequest, match=f"may ask for {best} or a higher number"):
        caller.check_priority(best - 1, 0)


def test_keys_share_no_prefixes_unless_all_do() -> None:
    alice, bob = Caller(name="alice"), Caller(name="bob")
    names = [caller.namespace(salt, shared=False) for caller in (ANYONE, alice, bob) for salt in ("", "s", "alice", "bob")]
    assert len(set(names)) == len(names)
    assert alice.namespace("s", shared=True) == bob.namespace("s", shared=True) == ANYONE.namespace("s", shared=False) == "s"
