"""Finding a key, and refusing without saying more than the asker knows."""

import pytest

from relay.auth.entry import Entry
from relay.auth.keys import KeyRing, hash_of, new_key
from relay.errors import Unauthorized

NOW = 1_800_000_000.0


def ring(**keys: str | None) -> KeyRing:
    return KeyRing([Entry(name=name, sha256=hash_of(name.encode() * 9), expires=expires) for name, expires in keys.items()])


def test_a_key_is_found_by_itself_alone() -> None:
    known = ring(alice=None, bob=None)
    assert known.find([b"alice" * 9], NOW).name == "alice"
    assert known.find([b"wrong", b"bob" * 9], NOW).name == "bob"
    for wrong in (b"", b"alice", b"alice" * 8, b"alice" * 9 + b"x", hash_of(b"alice" * 9).encode()):
        with pytest.raises(Unauthorized, match="not known"):
            known.find([wrong], NOW)


def test_nothing_sent_and_nothing_known_are_told_apart() -> None:
    with pytest.raises(Unauthorized, match="no API key was sent"):
        ring(alice=None).find([], NOW)
    with pytest.raises(Unauthorized, match="not known"):
        ring().find([b"x"], NOW)


def test_an_expired_key_is_refused_by_name() -> None:
    known = ring(old="2020-01-01", young="2040-01-01")
    assert known.find([b"young" * 9], NOW).name == "young"
    with pytest.raises(Unauthorized, match="`old` has expired"):
        known.find([b"old" * 9], NOW)


def test_no_refusal_repeats_the_key() -> None:
    with pytest.raises(Unauthorized) as caught:
        ring().find([b"sk-secret"], NOW)
    assert "secret" not in caught.value.message


def test_new_keys_differ_and_are_long() -> None:
    keys = [new_key() for _ in range(50)]
    assert len(dict.fromkeys(keys)) == 50
    assert all(key.startswith("sk-relay-") and len(key) == 52 for key in keys)
