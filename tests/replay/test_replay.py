"""Loads replayed on virtual time: they are answered, they replay, and placement by prefix finds what another does not."""

import json
from pathlib import Path

import pytest

from relay.bench.statistic import Distribution
from relay.bench.trace import Row, read_trace
from relay.config import RouterConfig
from relay.replay.__main__ import main
from relay.replay.cluster import Setup
from relay.replay.load import Visit, bound, bursts, one_prefix, paced, trace_load
from relay.replay.machine import StepCost
from relay.replay.play import Figures, play


def conversations(n: int, turns: int, blocks: int = 6) -> list[Row]:
    """Each turn of each of `n` conversations is the turn before and `blocks` Mooncake blocks more. Not in step with the workers."""
    rows = []
    for turn in range(turns):
        for i in range(n):
            ids = tuple(10_000 * i + k for k in range(blocks * (turn + 1)))
            rows.append(Row(at_s=n * turn + (i * 7 % n), prompt_tokens=512 * len(ids) - 100, output_tokens=100, hash_ids=ids))
    return sorted(rows, key=lambda row: row.at_s)


VISITS = trace_load(conversations(9, 4))


def run(visits: list[Visit], placement: str = "kv_aware", load: float = 0.6, local: int = 0, n_blocks: int = 2000) -> Figures:
    router = RouterConfig(placement=placement, local_prefill_tokens=local)  # type: ignore[arg-type]
    setup = Setup(n_blocks=n_blocks, router=router)
    return play(setup, paced(visits, load, setup.n_prefill, setup.cost))


def ttft_ms(figures: Figures) -> Distribution:
    assert figures.ttft_ms is not None
    return figures.ttft_ms


def test_equal_beginnings_are_equal_ids_and_nothing_else_is() -> None:
    one, two, three = trace_load(
        [
            Row(at_s=0.0, prompt_tokens=1024, output_tokens=64, hash_ids=(5, 6)),
            Row(at_s=1.0, prompt_tokens=1500, output_tokens=64, hash_ids=(5, 7, 8)),
            Row(at_s=2.0, prompt_tokens=600, output_tokens=64, hash_ids=(6, 9)),
        ]
    )
    assert (len(one.prompt), len(two.prompt), len(three.prompt)) == (32, 47, 19)
    assert one.prompt[:16] == two.prompt[:16]
    assert one.prompt[16:] == three.prompt[:16]
    assert [n for n in one.prompt if n in two.prompt] == list(one.prompt[:16])
    assert one.n_answer == 2


def test_the_bound_counts_full_blocks_behind_equal_beginnings_but_for_the_last_token() -> None:
    long = tuple(range(1, 49))
    visits = [Visit(0.0, long, 1), Visit(1.0, long, 1), Visit(2.0, long[:40], 1), Visit(3.0, long[16:], 1)]
    found = bound(visits, StepCost())
    assert (found.n_prompt, found.n_cached) == (48 + 48 + 40 + 32, 32 + 32)
    alone = StepCost().prompt_ms(0, 48) + 1 * StepCost().prompt_ms(32, 48) + StepCost().prompt_ms(32, 40) + StepCost().prompt_ms(0, 32)
    assert found.prefill_s == pytest.approx(alone / 1e3)


def test_pace_is_what_the_prefill_workers_could_just_do_over_the_load() -> None:
    cost = StepCost()
    span_s = paced(VISITS, 0.5, 2, cost)[-1].at_s
    assert span_s == pytest.approx(bound(VISITS, cost).prefill_s)
    assert paced(VISITS, 1.0, 2, cost)[-1].at_s == pytest.approx(span_s / 2)


def test_a_prompt_alone_takes_the_time_of_its_steps() -> None:
    cost = StepCost()
    found = play(Setup(), [Visit(0.0, tuple(range(1, 101)), 1)])
    n_steps = (ttft_ms(found).p50 - cost.prompt_ms(0, 100) - cost.drawn_ms) / cost.fixed_ms
    assert n_steps == pytest.approx(round(n_steps), abs=1e-3)
    assert 3 <= round(n_steps) <= 6, "steps of up to 40 ms"


def test_prefix_aware_placement_finds_what_taking_turns_does_not() -> None:
    aware, turns = run(VISITS), run(VISITS, "round_robin")
    assert aware.n_failed == turns.n_failed == 0
    assert aware.n_prompt == turns.n_prompt == sum(len(visit.prompt) for visit in VISITS)
    most = bound(VISITS, StepCost()).hit_rate
    assert turns.hit_rate + 0.1 < aware.hit_rate <= most
    assert aware.busiest_prefill < 0.65
    assert sum(aware.computed.values()) < sum(turns.computed.values())


def test_a_cache_too_small_for_all_forgets() -> None:
    assert run(VISITS, n_blocks=60).hit_rate < 0.7 * run(VISITS).hit_rate


def test_one_hot_prefix_does_not_crowd_one_worker() -> None:
    """sglang#21199."""
    visits = one_prefix(120)
    aware, turns = run(visits, load=0.8), run(visits, "round_robin", load=0.8)
    assert aware.busiest_prefill < 0.6
    assert ttft_ms(aware).p90 < 1.1 * ttft_ms(turns).p90


def test_bursts_with_a_new_prefix_do_not_compute_it_once_for_each_worker() -> None:
    """The cache has it only when the first is through; the router knows where it is coming."""
    visits = bursts(128)
    aware, turns = run(visits, load=0.8), run(visits, "round_robin", load=0.8)
    assert aware.hit_rate > turns.hit_rate + 0.01
    assert ttft_ms(aware).mean < 0.8 * ttft_ms(turns).mean


def test_decode_workers_take_short_prompts_where_they_may() -> None:
    none, some = run(VISITS), run(VISITS, local=128)
    assert none.local == 0
    assert none.computed["decode-0"] == 0
    assert 0 < some.local < some.n_requests
    assert some.computed["decode-0"] > 0


def test_a_replay_is_the_same_again() -> None:
    visits = bursts(64)
    assert run(visits) == run(visits)


def test_the_command_prints_a_table_and_writes_all_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, target = tmp_path / "trace.jsonl", tmp_path / "figures.json"
    lines = [
        {"timestamp": 1e3 * r.at_s, "input_length": r.prompt_tokens, "output_length": r.output_tokens, "hash_ids": list(r.hash_ids)}
        for r in conversations(3, 2)
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert len(read_trace(trace)) == 6
    arguments = [str(trace), "--loads", "0.5", "--placements", "kv_aware", "round_robin", "--cases", "trace", "bursts", "--rows", "16"]
    assert main([*arguments, "--json", str(target)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 2 + 4
    assert all(line.count("|") == printed[0].count("|") for line in printed)
    runs = json.loads(target.read_text())
    assert [(each["name"], each["setup"]["router"]["placement"]) for each in runs] == [
        ("trace", "kv_aware"),
        ("trace", "round_robin"),
        ("bursts", "kv_aware"),
        ("bursts", "round_robin"),
    ]
    assert runs[0]["figures"]["n_requests"] == 6


def test_a_trace_that_is_none_is_refused_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "nothing.jsonl")]) == 2
    assert "nothing.jsonl" in capsys.readouterr().err
