"""What a death proves against the request that was being computed."""

import pytest

from relay.runtime.suspicion import Suspicion, blame_of


@pytest.mark.parametrize(
    ("ended", "blame"),
    [("SIGSEGV", "step"), ("SIGABRT", "step"), ("exit 1", "step"), ("exit -1", "step"), ("SIGKILL", "anybody"), ("SIGHUP", "anybody")],
)
def test_a_crash_is_the_steps_own_and_a_kill_anybodys(ended: str, blame: str) -> None:
    assert blame_of(ended) == blame


def test_one_crash_alone_convicts_and_one_in_company_does_not() -> None:
    suspicion = Suspicion()
    assert not suspicion.convicts(("a", "b"), False, "step")
    assert suspicion.convicts(("a",), True, "step")


def test_the_third_kill_in_a_row_convicts() -> None:
    suspicion = Suspicion()
    assert [suspicion.convicts(("a",), True, "anybody") for _ in range(3)] == [False, False, True]
    assert not suspicion.convicts(("a",), True, "anybody"), "it begins again"


def test_a_death_in_company_shows_that_it_had_been_acquitted() -> None:
    suspicion = Suspicion()
    for _ in range(2):
        assert not suspicion.convicts(("a",), True, "anybody")
    assert not suspicion.convicts(("a", "b"), False, "anybody")
    assert not suspicion.convicts(("a",), True, "anybody")


def test_each_request_has_its_own_count() -> None:
    suspicion = Suspicion()
    assert not any(suspicion.convicts((name,), True, "anybody") for name in "abcabc")


def test_nobody_in_the_step_is_nobodys_fault() -> None:
    assert not Suspicion().convicts((), False, "step")
