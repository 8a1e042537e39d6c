"""Keys out of headers: every spelling that clients have, nothing else, and never an exception."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from relay.auth.credentials import presented


@pytest.mark.parametrize(
    ("headers", "keys"),
    [
        ([], ()),
        ([(b"authorization", b"Bearer k")], (b"k",)),
        ([(b"authorization", b"bearer k")], (b"k",)),
        ([(b"authorization", b"BEARER\t k  ")], (b"k",)),
        ([(b"authorization", b"  Bearer  k")], (b"k",)),
        ([(b"authorization", b"Bearer")], ()),
        ([(b"authorization", b"Bearer ")], ()),
        ([(b"authorization", b"")], ()),
        ([(b"authorization", b"Bearerk")], ()),
        ([(b"authorization", b"Bearer a b")], ()),
        ([(b"authorization", b"Basic k")], ()),
        ([(b"authorization", b"k")], ()),
        ([(b"authorization", b"Bearer None")], (b"None",)),
        ([(b"authorization", b"Bearer " + b"x" * 513)], ()),
        ([(b"x-api-key", b" k ")], (b"k",)),
        ([(b"x-api-key", b"")], ()),
        ([(b"x-api-key", b"x"), (b"authorization", b"Bearer b")], (b"b", b"x")),
        ([(b"authorization", b"Bearer a"), (b"authorization", b"Bearer b")], (b"a", b"b")),
        ([(b"authorization", b"Basic dTpw"), (b"x-api-key", b"k")], (b"k",)),
    ],
)
def test_keys_are_found_however_they_are_spelled(headers: list[tuple[bytes, bytes]], keys: tuple[bytes, ...]) -> None:
    """vllm#18892: `bearer`, two spaces, x-api-key, an empty header."""
    assert presented(headers) == keys


@given(st.lists(st.tuples(st.sampled_from([b"authorization", b"x-api-key", b"cookie"]), st.binary(max_size=600))))
@example([(b"authorization", b"bearer \xff\x00\n")])
def test_no_header_makes_it_raise_or_find_a_key_with_blanks(headers: list[tuple[bytes, bytes]]) -> None:
    for key in presented(headers):
        assert 0 < len(key) <= 512
        assert any(key in value for _, value in headers)
        assert not key.startswith((b" ", b"\t"))


@given(
    st.binary(min_size=1, max_size=512).filter(lambda key: not set(key) & set(b" \t")),
    st.text("bB", min_size=1, max_size=1),
    st.text(" \t", max_size=4),
    st.text(" \t", min_size=1, max_size=4),
    st.text(" \t", max_size=4),
)
def test_blanks_and_case_around_a_key_never_matter(key: bytes, b: str, before: str, between: str, after: str) -> None:
    value = before.encode() + b.encode() + b"EaReR" + between.encode() + key + after.encode()
    assert presented([(b"authorization", value)]) == (key,)
