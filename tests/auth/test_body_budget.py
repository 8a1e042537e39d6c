"""The budget of request bodies, and a key's share of it."""

import pytest

from relay.auth.caller import ANYONE, Caller
from relay.errors import Overloaded, RateLimited
from relay.http.body_budget import BodyBudget


def test_nothing_beyond_the_limit_is_taken() -> None:
    bodies = BodyBudget(100, 0.5)
    bodies.take(ANYONE, 60)
    with pytest.raises(Overloaded) as refused:
        bodies.take(ANYONE, 41)
    assert refused.value.retry_after_s
    assert (bodies.held, bodies.refused) == (60, 1)
    bodies.take(ANYONE, 40)
    bodies.give_back(ANYONE, 100)
    assert bodies.held == 0


def test_a_key_has_its_share_at_most() -> None:
    bodies, alice, bob = BodyBudget(100, 0.5), Caller(name="alice"), Caller(name="bob")
    bodies.take(alice, 50)
    with pytest.raises(RateLimited):
        bodies.take(alice, 1)
    bodies.take(bob, 50)
    with pytest.raises(Overloaded):
        bodies.take(bob, 1)
    bodies.give_back(alice, 50)
    bodies.take(alice, 1)
    assert (bodies.held, bodies.refused) == (51, 2)


def test_a_request_without_a_body_gives_nothing_back() -> None:
    """With keys, every GET ended in a KeyError of the gateway's."""
    bodies = BodyBudget(100, 0.5)
    bodies.give_back(Caller(name="alice"), 0)
    assert bodies.held == 0
