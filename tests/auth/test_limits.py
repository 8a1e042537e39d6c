"""Accounts against a slow oracle, and the promises one by one. Times are made up; nothing waits."""

import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from relay.auth.limits import MINUTE_NS, Accounts
from relay.messages import Address, Claim, Denied, Granted, Limits, Reserve

A, B = Address("quota/0", 1), Address("quota/1", 1)
S = 1_000_000_000


def reserve(accounts: Accounts, now_ns: int, request_id: str, limits: Limits, n_tokens: int = 10, **more: Any) -> Granted | Denied:
    message = Reserve(
        request_id=request_id,
        key=more.get("key", "k"),
        limits=limits,
        n_prompt=more.get("n_prompt", 4),
        n_tokens=n_tokens,
        quota=more.get("quota", A),
    )
    return accounts.reserve(now_ns, message)


def test_requests_of_two_gateways_share_one_limit() -> None:
    accounts, limits = Accounts(), Limits(requests=3)
    answers = [reserve(accounts, i, str(i), limits, quota=(A, B)[i % 2]) for i in range(5)]
    assert [type(answer) for answer in answers] == [Granted] * 3 + [Denied] * 2
    assert [answer.standing.requests_left for answer in answers] == [2, 1, 0, 0, 0]


def test_a_request_leaves_its_minute_and_not_a_moment_before() -> None:
    accounts, limits = Accounts(), Limits(requests=1)
    reserve(accounts, 5 * S, "a", limits)
    early = reserve(accounts, 5 * S + MINUTE_NS - 1, "b", limits)
    assert isinstance(early, Denied)
    assert early.retry_after_ms == 1
    assert isinstance(reserve(accounts, 5 * S + MINUTE_NS, "c", limits), Granted)


def test_the_time_to_come_again_is_when_this_very_request_fits() -> None:
    accounts, limits = Accounts(), Limits(tokens=100)
    for i, n in enumerate((30, 30, 30)):
        reserve(accounts, i * S, str(i), limits, n)
    denied = reserve(accounts, 10 * S, "x", limits, 50)
    assert isinstance(denied, Denied)
    assert denied.limit == "tokens"
    assert denied.retry_after_ms == 51_000  # the second must go, too
    assert denied.standing.tokens_left == 10
    assert denied.standing.tokens_reset_ms == 52_000
    assert isinstance(reserve(accounts, 10 * S + denied.retry_after_ms * 1_000_000, "x", limits, 50), Granted)


def test_the_limit_that_takes_longest_is_named() -> None:
    accounts = Accounts()
    limits = Limits(requests=2, tokens=20, concurrency=1)
    reserve(accounts, 0, "a", limits, 15)
    denied = reserve(accounts, S, "b", limits, 15)
    assert isinstance(denied, Denied)
    assert (denied.limit, denied.retry_after_ms) == ("tokens", 59_000)
    accounts.settle(A, "a", 0)
    assert isinstance(reserve(accounts, S, "b", limits, 15), Granted)


def test_what_is_settled_counts_what_it_used() -> None:
    accounts, limits = Accounts(), Limits(tokens=100)
    reserve(accounts, 0, "a", limits, 90)
    assert isinstance(reserve(accounts, 1, "b", limits, 60), Denied)
    accounts.settle(A, "a", 40)
    accounts.settle(A, "a", 0)  # once is enough
    granted = reserve(accounts, 2, "b", limits, 60)
    assert isinstance(granted, Granted)
    assert granted.standing.tokens_left == 0


def test_a_request_older_than_its_minute_still_runs_and_frees_its_place_alone() -> None:
    accounts, limits = Accounts(), Limits(tokens=100, concurrency=1)
    reserve(accounts, 0, "a", limits, 90)
    late = 2 * MINUTE_NS
    denied = reserve(accounts, late, "b", limits, 100)
    assert isinstance(denied, Denied)
    assert denied.limit == "concurrency"
    accounts.settle(A, "a", 5)
    assert isinstance(reserve(accounts, late, "b", limits, 100), Granted)


def test_a_dead_gateways_requests_come_back_and_count_their_prompts() -> None:
    accounts, limits = Accounts(), Limits(tokens=100, concurrency=3)
    for i, quota in enumerate((A, A, B)):
        reserve(accounts, i, str(i), limits, 30, n_prompt=4, quota=quota)
    assert accounts.release(A) == 2
    assert accounts.release(A) == 0
    granted = reserve(accounts, 5, "x", limits, 62)
    assert isinstance(granted, Granted)
    assert granted.standing.tokens_left == 0
    assert isinstance(reserve(accounts, 6, "y", limits, 0), Granted)
    assert isinstance(reserve(accounts, 7, "z", limits, 0), Denied)


def test_what_is_reserved_twice_counts_once() -> None:
    accounts, limits = Accounts(), Limits(requests=2)
    assert reserve(accounts, 0, "a", limits) == reserve(accounts, 0, "a", limits)
    assert isinstance(reserve(accounts, 0, "b", limits), Granted)


def test_keys_know_nothing_of_each_other() -> None:
    accounts, limits = Accounts(), Limits(requests=1)
    for key in "abc":
        assert isinstance(reserve(accounts, 0, key, limits, key=key), Granted)


def test_a_lowered_limit_waits_for_enough_to_leave() -> None:
    accounts = Accounts()
    for i in range(5):
        reserve(accounts, i * S, str(i), Limits(requests=5))
    denied = reserve(accounts, 5 * S, "x", Limits(requests=2))
    assert isinstance(denied, Denied)
    assert denied.retry_after_ms == 58_000


class _Oracle:
    """Every admission there ever was, counted anew for each question."""

    def __init__(self) -> None:
        self.all: dict[str, dict[str, Any]] = {}

    def room(self, now_ns: int, limits: Limits, n_tokens: int) -> bool:
        recent = [use for use in self.all.values() if now_ns - use["at"] < MINUTE_NS]
        return (
            (not limits.requests or len(recent) < limits.requests)
            and (not limits.tokens or sum(use["tokens"] for use in recent) + n_tokens <= limits.tokens)
            and (not limits.concurrency or sum(use["open"] for use in self.all.values()) < limits.concurrency)
        )

    def end(self, name: str, n_tokens: int) -> None:
        if self.all[name]["open"]:
            self.all[name] |= {"open": False, "tokens": n_tokens}


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 2**32), st.builds(Limits, *[st.integers(0, 5) | st.just(0)], tokens=st.integers(0, 80), concurrency=st.integers(0, 4))
)
def test_every_answer_is_the_oracles_over_ends_deaths_and_restarts(seed: int, limits: Limits) -> None:
    draw = random.Random(seed)
    accounts, oracle, now = Accounts(), _Oracle(), 0
    mirrors = {A: Accounts(), B: Accounts()}
    for step in range(120):
        now += draw.randrange(0, MINUTE_NS // 4)
        quota, name = draw.choice((A, B)), str(step)
        what = draw.random()
        running = [key for key, use in oracle.all.items() if use["open"]]
        if what < 0.6:
            n = draw.randrange(1, 40)
            room = oracle.room(now, limits, n)
            message = Reserve(request_id=name, key="k", limits=limits, n_prompt=1, n_tokens=n, quota=quota)
            answer = accounts.reserve(now, message)
            assert isinstance(answer, Granted) == room
            if room:
                oracle.all[name] = {"at": now, "tokens": n, "open": True, "quota": quota}
                mirrors[quota].add(now, message)
        elif what < 0.9 and running:
            ended, used = draw.choice(running), draw.randrange(0, 40)
            holder = oracle.all[ended]["quota"]
            for each in (accounts, mirrors[holder]):
                each.settle(holder, ended, used)
            oracle.end(ended, used)
        elif what < 0.95:  # the limiter starts anew and is told
            accounts = Accounts()
            for holder, mirror in draw.sample(list(mirrors.items()), 2):
                accounts.restore(now, Claim(quota=holder, uses=tuple(mirror.uses(now))))
        else:  # a gateway dies; its history stays with the limiter, and with the copy that the test keeps
            for each in (accounts, mirrors[quota]):
                each.release(quota)
            for key in running:
                if oracle.all[key]["quota"] == quota:
                    oracle.end(key, 1)
