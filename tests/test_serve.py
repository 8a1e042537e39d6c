"""What the root refuses before it starts anything."""

import resource

import pytest

from relay.errors import StartError
from relay.serve import allow_connections


def test_more_connections_than_open_files_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 4096))
    with pytest.raises(StartError, match=r"gateway.max_connections is 8192, which needs 8704 open files, and this user may have 4096"):
        allow_connections(8192)


def test_the_limit_of_open_files_is_raised_as_far_as_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[tuple[int, tuple[int, int]]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 20_000))
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: raised.append((which, limits)))
    allow_connections(8192)
    allow_connections(100)
    assert raised == [(resource.RLIMIT_NOFILE, (8704, 20_000))]
