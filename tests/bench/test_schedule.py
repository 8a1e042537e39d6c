"""What is planned: arrivals, contents, traces at other scales, clipping."""

import itertools
import statistics
from pathlib import Path

import pytest

from relay.bench.lengths import parse_lengths
from relay.bench.schedule import Clipped, Planned, Segment, Workload, arrivals, at_once, clip, replay
from relay.bench.trace import Row, read_trace

DATA = Path(__file__).parent.parent / "data"


def workload(seed: int = 0, shared_prefix: int = 0) -> Workload:
    return Workload(prompt=parse_lengths("50:150"), output=parse_lengths("10:20"), shared_prefix=shared_prefix, seed=seed)


def planned(prompt: tuple[Segment, ...], output: int) -> Planned:
    return Planned(index=0, at_s=0.0, prompt=prompt, output_tokens=output)


def test_poisson_arrivals_have_their_rate_and_spread() -> None:
    times = list(arrivals(20.0, 1.0, 200.0, seed=3))
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert len(times) == pytest.approx(4000, rel=0.05)
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(1.0, rel=0.05)
    assert times == sorted(times)
    assert times[-1] < 200.0


def test_burstiness_is_the_shape_of_the_gaps_and_leaves_the_rate() -> None:
    for shape, spread in ((0.25, 2.0), (4.0, 0.5)):
        times = list(arrivals(20.0, shape, 400.0, seed=3))
        gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
        assert len(times) == pytest.approx(8000, rel=0.08)
        assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(spread, rel=0.1)


def test_one_seed_is_one_plan_and_another_another() -> None:
    plans = [list(workload(seed).requests(arrivals(5.0, 1.0, 10.0, seed))) for seed in (1, 1, 2)]
    assert plans[0] == plans[1]
    assert [p.at_s for p in plans[0]] != [p.at_s for p in plans[2]]
    assert [p.prompt_tokens for p in plans[0]] != [p.prompt_tokens for p in plans[2]][: len(plans[0])]


def test_a_shared_prefix_is_part_of_the_length_and_the_rest_is_each_ones_own() -> None:
    plain = list(workload().requests(at_once(20)))
    shared = list(workload(shared_prefix=60).requests(at_once(20)))
    assert [p.prompt_tokens for p in plain] == [p.prompt_tokens for p in shared]
    assert {p.prompt[0] for p in shared if p.prompt_tokens >= 60} == {Segment("shared", 60)}
    assert min(p.prompt_tokens for p in shared) < 60, "a short prompt is all prefix"
    assert all(len(p.prompt) == 1 for p in shared if p.prompt_tokens <= 60)
    own = [p.prompt[1].key for p in shared if len(p.prompt) == 2]
    assert len(set(own)) == len(own)


@pytest.mark.parametrize("scale", [1.0, 1 / 32, 1 / 100, 0.7])
def test_equal_beginnings_of_a_trace_stay_equal_at_every_scale(scale: float) -> None:
    rows = [Row(at_s=0.0, prompt_tokens=512 * 6 + 100, output_tokens=9, hash_ids=(1, 2, 3, 4, 5, 6, last)) for last in (7, 8)]
    one, other = replay(rows, length_scale=scale, time_scale=1.0, duration_s=None)
    assert one.prompt[:-1] == other.prompt[:-1]
    assert one.prompt[-1].key != other.prompt[-1].key
    assert one.prompt_tokens == round((512 * 6 + 100) * scale)
    assert sum(s.tokens for s in one.prompt[:6]) == round(512 * 6 * scale)


def test_real_rows_become_blocks_of_their_ids() -> None:
    first, second, *_ = replay(read_trace(DATA / "mooncake_trace.jsonl"), length_scale=1 / 32, time_scale=0.5, duration_s=None)
    assert [(s.key, s.tokens) for s in first.prompt] == [
        ("block/0", 16),
        ("block/42", 16),
        ("block/43", 16),
        ("block/44", 16),
        ("block/45", 8),
    ]
    assert first.output_tokens == 10  # 316 / 32
    assert second.prompt[0] == first.prompt[0]
    assert second.at_s == pytest.approx(1.5)


def test_a_replay_ends_at_its_duration_and_rows_without_ids_have_contents_of_their_own() -> None:
    rows = read_trace(DATA / "azure_trace.csv")
    plan = list(replay(rows, length_scale=1.0, time_scale=2.0, duration_s=9.0))
    assert [p.at_s for p in plan] == pytest.approx([row.at_s * 2 for row in rows if row.at_s * 2 < 9.0])
    assert plan[0].prompt == (Segment("own/0", 374),)
    assert len(plan) < len(rows)


def test_no_row_becomes_empty() -> None:
    (one,) = replay([Row(at_s=0.0, prompt_tokens=3, output_tokens=0)], length_scale=1 / 32, time_scale=1.0, duration_s=None)
    assert (one.prompt_tokens, one.output_tokens) == (1, 1)


def test_clipping_cuts_the_end_of_the_prompt_and_counts_what_it_cut() -> None:
    clipped = Clipped()
    fits = planned((Segment("a", 60), Segment("b", 30)), 10)
    assert clip(fits, 100, clipped) == fits
    assert clipped == Clipped()
    cut = clip(planned((Segment("a", 60), Segment("b", 80)), 30), 100, clipped)
    assert cut.prompt == (Segment("a", 60), Segment("b", 10))
    assert cut.output_tokens == 30
    assert clipped == Clipped(requests=1, prompt_tokens=70, output_tokens=0)
    short = clip(planned((Segment("a", 60), Segment("b", 80)), 300), 100, clipped)
    assert short.prompt == (Segment("a", 50),)
    assert short.output_tokens == 50
    assert clipped == Clipped(requests=2, prompt_tokens=160, output_tokens=250)
