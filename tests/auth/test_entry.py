"""The key file's text: what is right is read and can be added to, what is wrong is refused with what to do."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.auth.entry import Entry, parse_entries, with_entry
from relay.errors import ConfigError
from relay.messages import Limits

H = "a" * 64
FULL = f"""
# ours
- name: alice
  sha256: {H}
  scopes: [inference, metrics]
  rpm: 60
  tpm: 1000
  concurrency: 2
  best_priority: -3
  models: [m]
  expires: 2030-01-31
- {{name: bob, sha256: {"b" * 64}}}
"""


def test_entries_become_callers() -> None:
    alice, bob = parse_entries(FULL, "keys.yaml")
    assert alice.caller().limits == Limits(60, 1000, 2)
    assert alice.caller().has("metrics")
    assert (alice.caller().best_priority, bob.caller().best_priority) == (-3, None)
    assert not alice.caller().is_admin
    assert alice.expires_s == 1896048000.0
    assert bob.caller().limits == Limits()
    assert bob.caller().scopes == ("inference",)
    assert bob.expires_s == float("inf")
    assert parse_entries("# nobody yet\n", "keys.yaml") == ()


def test_a_time_zone_counts() -> None:
    times = ["2030-01-31T02:00:00+02:00", "2030-01-31T00:00:00Z", "2030-01-31"]
    assert {Entry(name="a", sha256=H, expires=text).expires_s for text in times} == {1896048000.0}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: 1", "expected a list of keys"),
        ("- 1", "keys.yaml"),
        ("- {name: a}", "sha256"),
        (f"- {{name: a, sha256: {H}, rmp: 1}}", "unknown key `[0].rmp`; did you mean `rpm`?"),
        (f"- {{name: a, sha256: {H}, rpm: 0}}", ">= 1"),
        (f"- {{name: 'a b', sha256: {H}}}", "name"),
        (f'- {{name: "a\\n", sha256: {H}}}', "name"),
        (f"- {{name: a, sha256: {H.upper()}}}", "sha256"),
        (f"- {{name: a, sha256: {H}, scopes: []}}", "scopes"),
        (f"- {{name: a, sha256: {H}, scopes: [root]}}", "scopes"),
        (f"- {{name: a, sha256: {H}, expires: soon}}", "key `a`: expires is `soon`"),
        (f"- {{name: a, sha256: {H}}}\n- {{name: a, sha256: {'b' * 64}}}", "two keys have the name `a`"),
        (f"- {{name: a, sha256: {H}}}\n- {{name: b, sha256: {H}}}", "two keys have the sha256"),
        (f"- {{name: a, name: b, sha256: {H}}}", "is there twice"),
        ("- {[1]: 2}", "not valid YAML"),
        ("- !!int x", "not valid YAML"),
        ("[" * 2000, "not valid YAML"),
        ("- !!python/object/apply:os.getpid []", "not valid YAML"),
    ],
)
def test_a_wrong_file_is_refused_with_what_to_do(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_entries(text, "keys.yaml")
    assert says in str(caught.value)
    assert str(caught.value).startswith("keys.yaml")


@given(st.text(st.sampled_from("-[]{}:#!&*'\"\n ab0"), max_size=40))
def test_whatever_stands_in_it_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(ConfigError):
        parse_entries(text, "keys.yaml")


@pytest.mark.parametrize("text", ["", "# nobody\n", FULL, FULL.rstrip(), "- {name: z, sha256: " + "c" * 64 + "}"])
def test_an_entry_can_be_added_to_any_list(text: str) -> None:
    entry = Entry(name="new", sha256="d" * 64, rpm=5, models=("a/b: c", "#d"), expires="2030-01-31")
    after = parse_entries(text + with_entry(text, entry, "f"), "f")
    assert after == (*parse_entries(text, "f"), entry)


@pytest.mark.parametrize("text", ["[]", "  - {name: z, sha256: " + "c" * 64 + "}\n", FULL + f"- {{name: new, sha256: {'e' * 64}}}\n"])
def test_where_it_cannot_be_added_that_is_said(text: str) -> None:
    with pytest.raises(ConfigError):
        with_entry(text, Entry(name="new", sha256="d" * 64), "f")
