"""Rows in parts: nothing is lost, and each part fits."""

import msgspec
import pytest

from relay.messages import Address, Logprobs, Row, Tokens
from relay.runtime.frames import MAX_FRAME, Deliver, pack
from relay.runtime.row_parts import PART_BYTES, frames_of, parts, row_bytes

ID = 2**31 - 1
TOP = Logprobs(-1.25, (ID,) * 20, (-2.5,) * 20)


def row(n_ids: int, n_scores: int, *, with_logprobs: bool = True, finish: str = "length") -> Row:
    logprobs = (TOP,) * n_ids if with_logprobs else ()
    trail = tuple((i, 10**18 + i) for i in range(30))
    return Row("r0123456789-12345-0123456789abcdef0123/4095", 2, 0, (ID,) * n_ids, trail, finish, logprobs, 16, (TOP,) * n_scores)  # type: ignore[arg-type]


@pytest.mark.parametrize(("n_ids", "n_scores"), [(1, 0), (1, 5000), (30_000, 0), (7000, 7000), (0, 3)])
def test_parts_hold_everything_once_and_in_order(n_ids: int, n_scores: int) -> None:
    whole = row(n_ids, n_scores)
    found = parts(whole)
    assert (len(found) == 1) == (row_bytes(whole) <= PART_BYTES)
    assert sum((each.ids for each in found), ()) == whole.ids
    assert sum((each.logprobs for each in found), ()) == whole.logprobs
    assert sum((each.prompt_logprobs for each in found), ()) == whole.prompt_logprobs
    at = n_seen = 0
    for each in found:
        assert each.first == n_seen
        assert not each.prompt_logprobs or each.scores_from == at
        assert not each.prompt_logprobs or n_seen == 0, "scores come before the first token"
        assert len(each.logprobs) == len(each.ids)
        n_seen, at = n_seen + len(each.ids), at + len(each.prompt_logprobs)
        assert row_bytes(each) <= PART_BYTES
    assert [each.finish for each in found] == [""] * (len(found) - 1) + [whole.finish]
    assert [each.trail for each in found] == [whole.trail] + [()] * (len(found) - 1)
    assert {each.n_cached for each in found} == {16}


def test_the_bound_holds_for_what_is_packed() -> None:
    for whole in (row(1, 0), row(100, 0), row(100, 0, with_logprobs=False), row(3, 200), row(30_000, 0, with_logprobs=False)):
        assert len(msgspec.msgpack.encode(whole)) <= row_bytes(whole)


def test_rows_of_many_sequences_go_in_frames_that_fit() -> None:
    rows = [(row(1 + i % 3, 0), ((1, 2),)) for i in range(4000)] + [(row(70_000, 3000), ((3, 4),))]
    frames = list(frames_of(rows))
    assert len(frames) > 1
    for frame in frames:
        assert (
            len(pack(Deliver(1, Address("gateway/0", 1), Tokens(source=Address("decode/0", 1), rows=tuple(r for r, _ in frame)))))
            < MAX_FRAME
        )
    assert sum(len(each.ids) for frame in frames for each, _ in frame) == sum(len(each.ids) for each, _ in rows)
    assert [trail for frame in frames for each, trail in frame][: len(rows)] == [trail for _, trail in rows]


def test_a_usual_step_is_one_frame() -> None:
    rows = [(Row(f"r{i}", 1, 5, (7,)), ()) for i in range(256)]
    assert list(frames_of(rows)) == [rows]
