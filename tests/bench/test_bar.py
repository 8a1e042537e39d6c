"""Progress in a terminal, and none elsewhere."""

from io import StringIO

import trio
from rich.console import Console
from trio.testing import MockClock

from relay.bench.bar import show_progress
from relay.bench.load import Load
from relay.bench.record import Record
from relay.bench.schedule import Planned
from tests.bench.records import record


async def ask(body: bytes, planned: Planned, start: float, epoch: float) -> Record:
    raise AssertionError("nothing is sent here")


async def shown(terminal: bool) -> str:
    out = StringIO()
    load = Load(lambda planned: b"", ask)
    load.records += [record(), record(failure="cut")]
    load.in_flight, load.failed = 3, 1
    with trio.move_on_after(2.0):
        await show_progress(load, 10, Console(file=out, force_terminal=terminal, width=100))
    return out.getvalue()


def test_progress_is_shown_in_a_terminal_only() -> None:
    text = trio.run(shown, True, clock=MockClock(autojump_threshold=0))
    assert "2/10" in text
    assert "3 in flight, 1 failed" in text
    assert trio.run(shown, False, clock=MockClock(autojump_threshold=0)) == ""
