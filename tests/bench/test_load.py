"""When requests are sent, on a virtual clock: no network, answers take a known time."""

from array import array

import trio
from trio.testing import MockClock

from relay.bench.load import Load
from relay.bench.record import Record
from relay.bench.schedule import Planned, Segment


def plan(*at_s: float) -> list[Planned]:
    return [Planned(index=i, at_s=at, prompt=(Segment("x", 1),), output_tokens=1) for i, at in enumerate(at_s)]


class Answers:
    """Takes `each_s` for an answer; `busy` and `most` count how many are under way."""

    def __init__(self, each_s: float) -> None:
        self._each_s = each_s
        self.busy = self.most = 0
        self.sent_s: list[float] = []

    async def ask(self, body: bytes, planned: Planned, start: float, epoch: float) -> Record:
        sent_s = trio.current_time() - epoch
        self.sent_s.append(sent_s)
        self.busy += 1
        self.most = max(self.most, self.busy)
        await trio.sleep(self._each_s)
        self.busy -= 1
        end_s = trio.current_time() - epoch
        return Record(
            index=planned.index,
            start_s=start - epoch,
            sent_s=sent_s,
            end_s=end_s,
            asked_prompt_tokens=1,
            asked_output_tokens=1,
            chunk_s=array("d", [end_s]),
        )


def run(answers: Answers, requests: list[Planned], *, concurrency: int | None, prepare_s: float = 0.0) -> Load:
    clock = MockClock(autojump_threshold=0)

    def prepare(planned: Planned) -> bytes:
        clock.jump(prepare_s)
        return b"x"

    async def main() -> Load:
        load = Load(prepare, answers.ask)
        with trio.fail_after(1000):
            await (load.open(requests) if concurrency is None else load.closed(requests, concurrency))
        return load

    return trio.run(main, clock=clock)


def test_a_closed_loop_keeps_its_streams_busy_and_no_more() -> None:
    answers = Answers(2.0)
    load = run(answers, plan(*[0.0] * 10), concurrency=4)
    assert answers.most == 4
    assert answers.sent_s == [0.0] * 4 + [2.0] * 4 + [4.0] * 2
    assert sorted(record.index for record in load.records) == list(range(10))
    assert {record.e2e_s for record in load.records} == {2.0}


def test_an_open_loop_sends_on_time_however_slow_the_server_is() -> None:
    answers = Answers(100.0)
    load = run(answers, plan(0.5, 1.0, 1.25, 7.0), concurrency=None)
    assert answers.sent_s == [0.5, 1.0, 1.25, 7.0]
    assert answers.most == 4
    assert {record.e2e_s for record in load.records} == {100.0}


def test_what_is_sent_late_counts_from_when_it_was_due() -> None:
    """Coordinated omission: making a body takes 3 s here, so the second and third are sent late, and their latency says so."""
    load = run(Answers(10.0), plan(3.0, 4.0, 5.0), concurrency=None, prepare_s=3.0)
    assert [record.start_s for record in load.records] == [3.0, 4.0, 5.0]
    assert [record.sent_s for record in load.records] == [3.0, 6.0, 9.0]
    assert [record.e2e_s for record in load.records] == [10.0, 12.0, 14.0]


def test_a_closed_loop_does_not_count_the_making_of_a_body() -> None:
    load = run(Answers(10.0), plan(0.0, 0.0), concurrency=1, prepare_s=3.0)
    assert [record.e2e_s for record in load.records] == [10.0, 10.0]


def test_a_cancelled_load_keeps_what_ended_and_counts_what_did_not() -> None:
    async def main() -> Load:
        load = Load(lambda planned: b"x", Answers(2.0).ask)
        with trio.move_on_after(5.0):
            await load.closed(plan(*[0.0] * 100), 3)
        return load

    load = trio.run(main, clock=MockClock(autojump_threshold=0))
    assert len(load.records) == 6
    assert load.in_flight == 3
