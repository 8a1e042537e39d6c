"""Logs of resumable attempts: whom they wait for."""

from typing import Any

import pytest

from relay.engine import token_log
from relay.engine.token_log import TokenLog, TokenLogs
from relay.messages import Address, Admit, Logprobs, Resumable, Row, Sampling, Stopping


def admit(request_id: str, *, public_id: str = "", owner: str = "", secret: str = "", n_envelope: int = 0) -> Admit:
    return Admit(
        request_id=request_id,
        attempt=1,
        tokens=(1, 2, 3),
        n_prompt=3,
        sampling=Sampling(),
        stopping=Stopping(max_tokens=8),
        gateway=Address("gateway/0", 1),
        resumable=Resumable(public_id or f"mine-{request_id}", b"e" * n_envelope, owner, secret),
    )


def opened(logs: TokenLogs, request_id: str, **more: Any) -> TokenLog:
    log = logs.open(admit(request_id, **more))
    assert log is not None
    return log


def test_a_log_waits_for_a_reader_from_when_its_own_has_gone_until_another_comes() -> None:
    logs = TokenLogs(60.0)
    log = opened(logs, "a")
    assert not logs.unread()
    log.orphaned()
    assert logs.unread()
    logs.add(log, Row("a", 1, 0, (7,), (), "length"))
    log.end()
    assert logs.unread()  # it ended while nobody read it
    log.adopted()
    assert not logs.unread()
    assert log.row(("a", 1)).ids == (7,)


def test_what_was_read_to_its_end_waits_for_nobody() -> None:
    logs = TokenLogs(60.0)
    opened(logs, "a").end()
    assert not logs.unread()


def test_a_log_that_nobody_came_for_is_forgotten_after_its_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1_000
    monkeypatch.setattr(token_log, "now_ns", lambda: now)
    logs = TokenLogs(1.0)
    log = opened(logs, "a")
    log.orphaned()
    now += 1_000_000_000
    assert logs.expired() == []
    now += 1
    assert logs.expired() == [("a", 1)]
    assert not logs.unread()
    assert logs.get(("a", 1)) is None


def found(logs: TokenLogs, *who: str) -> list[str]:
    return [key[0] for key, _ in logs.find(*who)]


def test_a_stream_is_found_by_our_id_or_by_the_clients_with_what_proves_that_it_is_its_own() -> None:
    logs = TokenLogs(60.0)
    opened(logs, "r1", public_id="mine")
    opened(logs, "r2", public_id="mine", secret="x" * 16)
    opened(logs, "r3", public_id="mine", owner="alice")
    assert found(logs, "r1") == ["r1"]
    assert found(logs, "mine") == []  # anybody could have guessed that
    assert found(logs, "mine", "", "y" * 16) == []
    assert found(logs, "mine", "", "x" * 16) == ["r2"]
    assert found(logs, "mine", "alice") == ["r3"]
    assert found(logs, "mine", "bob") == found(logs, "r3", "bob") == found(logs, "r3") == []


def test_of_requests_with_one_name_the_newest_is_told_and_its_envelope_once() -> None:
    logs = TokenLogs(60.0)
    for request in ("r1", "r2"):
        opened(logs, f"{request}/0", public_id="mine", owner="alice", n_envelope=1000)
        opened(logs, f"{request}/1", public_id="mine", owner="alice")
    assert [(key[0], len(envelope)) for key, envelope in logs.find("mine", "alice")] == [("r2/0", 1000), ("r2/1", 0)]


def test_there_is_no_room_for_more_than_the_limit_and_ended_logs_make_it() -> None:
    logs = TokenLogs(60.0, max_bytes=10_000)
    first = opened(logs, "r1", n_envelope=5000)
    assert logs.open(admit("r2", n_envelope=5000)) is None  # nothing has ended
    first.end()
    opened(logs, "r2", n_envelope=5000)
    assert logs.get(("r1", 1)) is None
    assert logs.open(admit("r3", n_envelope=10_000)) is None
    assert logs.n_bytes <= 10_000


def test_what_grows_beyond_the_limit_takes_the_room_of_who_holds_most() -> None:
    logs = TokenLogs(60.0, max_bytes=40_000)
    small, large = opened(logs, "r1", owner="alice"), opened(logs, "r2", owner="bob")
    other = opened(logs, "r3", owner="bob")
    scores = tuple(Logprobs(-1.0, tuple(range(20)), (-1.0,) * 20) for _ in range(10))
    logs.add(small, Row("r1", 1, 0, tuple(range(10)), (), "", scores))
    for at in range(0, 1000, 10):
        logs.add(large, Row("r2", 1, at, tuple(range(10)), (), "", scores))
        assert logs.n_bytes <= 40_000
    assert logs.get(("r2", 1)) is None
    assert not large.is_kept
    assert logs.get(("r1", 1)) is small
    assert logs.get(("r3", 1)) is other
    assert small.row(("r1", 1)).logprobs == scores
    logs.add(large, Row("r2", 1, 1000, (1,)))  # of no effect
    small.end()
    other.end()
    logs.expired()
    assert logs.n_bytes == small.n_bytes + other.n_bytes
