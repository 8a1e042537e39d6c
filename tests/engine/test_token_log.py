"""Logs of resumable attempts: whom they wait for."""

import pytest

from relay.engine import token_log
from relay.engine.token_log import TokenLogs
from relay.messages import Address, Admit, Resumable, Row, Sampling, Stopping


def admit(request_id: str) -> Admit:
    return Admit(
        request_id=request_id,
        attempt=1,
        tokens=(1, 2, 3),
        n_prompt=3,
        sampling=Sampling(),
        stopping=Stopping(max_tokens=8),
        gateway=Address("gateway/0", 1),
        resumable=Resumable(public_id=f"mine-{request_id}", envelope=b""),
    )


def test_a_log_waits_for_a_reader_from_when_its_own_has_gone_until_another_comes() -> None:
    logs = TokenLogs(60.0)
    log = logs.open(admit("a"))
    assert not logs.unread()
    log.orphaned()
    assert logs.unread()
    log.add(Row("a", 1, 0, (7,), (), "length"))
    log.end()
    assert logs.unread()  # it ended while nobody read it
    log.adopted()
    assert not logs.unread()
    assert log.row(("a", 1)).ids == (7,)


def test_what_was_read_to_its_end_waits_for_nobody() -> None:
    logs = TokenLogs(60.0)
    logs.open(admit("a")).end()
    assert not logs.unread()


def test_a_log_that_nobody_came_for_is_forgotten_after_its_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1_000
    monkeypatch.setattr(token_log, "now_ns", lambda: now)
    logs = TokenLogs(1.0)
    log = logs.open(admit("a"))
    log.orphaned()
    now += 1_000_000_000
    assert logs.expired() == []
    now += 1
    assert logs.expired() == [("a", 1)]
    assert not logs.unread()
    assert logs.get(("a", 1)) is None
