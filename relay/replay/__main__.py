"""`python -m relay.replay TRACE`: a Mooncake trace, or loads made to be hard, on clusters of all asked shapes; a table, and all figures."""

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from relay.bench.trace import read_trace
from relay.config import RouterConfig
from relay.errors import StartError
from relay.replay.cluster import Setup
from relay.replay.load import Visit, bound, bursts, one_prefix, paced, trace_load
from relay.replay.play import Figures, play

PLACEMENTS = ("kv_aware", "least_loaded", "round_robin")
_HEAD = (
    "| load | workers | blocks | placement | local | requests | failed | hit rate | of at most | TTFT p50, ms | p90 | p99 | TPOT p50, ms "
    "| p99 | busiest prefill | prefill busy | decode busy | alone |\n|---|---|---:|---|" + "---:|" * 14
)


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """load: which, and the share of the prefill workers' time that it takes at least. bound: the hit rate of one cache without end."""

    name: str
    load: float
    setup: Setup
    bound: float
    figures: Figures

    def row(self) -> str:
        f, setup = self.figures, self.setup
        ttft = [f"{value:.0f}" for value in (f.ttft_ms.p50, f.ttft_ms.p90, f.ttft_ms.p99)] if f.ttft_ms is not None else ["", "", ""]
        tpot = [f"{f.tpot_ms.p50:.1f}", f"{f.tpot_ms.p99:.1f}"] if f.tpot_ms is not None else ["", ""]
        cells = (
            f"{self.name} {100 * self.load:.0f} %",
            f"{setup.n_prefill} + {setup.n_decode}",
            setup.n_blocks,
            setup.router.placement,
            setup.router.local_prefill_tokens,
            f.n_requests,
            f.n_failed,
            f"{100 * f.hit_rate:.1f} %",
            f"{100 * self.bound:.1f} %",
            *ttft,
            *tpot,
            f"{100 * f.busiest_prefill:.0f} %",
            f"{100 * f.mean_busy('prefill'):.0f} %",
            f"{100 * f.mean_busy('decode'):.0f} %",
            f.local,
        )
        return f"| {' | '.join(str(cell) for cell in cells)} |"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/replay_placement",
        description="Replay a trace on virtual time, once for each combination of what is asked. A load is the share of the prefill "
        "workers' time that its prompts would take if one cache without end served all of them.",
    )
    parser.add_argument("trace", type=Path, help="a Mooncake file; with --cases that name no trace it is not read")
    parser.add_argument("--cases", nargs="+", choices=("trace", "prefix", "bursts"), default=["trace"], help="default: trace")
    parser.add_argument("--rows", type=int, default=0, help="of the trace, its first ones; of other cases, requests (default: all, 2000)")
    parser.add_argument("--loads", nargs="+", type=float, default=[0.5, 0.8], help="default: 0.5 0.8")
    parser.add_argument("--workers", nargs="+", type=int, default=[2], help="as many prefill and as many decode workers (default 2)")
    parser.add_argument("--blocks", nargs="+", type=int, default=[2912], help="of each pool, 16 tokens each (default 2912: 1 GiB)")
    parser.add_argument("--placements", nargs="+", choices=PLACEMENTS, default=list(PLACEMENTS), help="default: all")
    parser.add_argument("--local", nargs="+", type=int, default=[0], help="router.local_prefill_tokens (default 0)")
    parser.add_argument("--json", type=Path, help="write all figures there")
    asked = parser.parse_args(arguments)
    try:
        loads = list(_loads(asked))
    except StartError as error:
        print(f"scripts/replay_placement: {error}", file=sys.stderr)
        return 2
    runs: list[Run] = []
    print(_HEAD, flush=True)
    for (name, visits), load, n, n_blocks, local, placement in itertools.product(
        loads, asked.loads, asked.workers, asked.blocks, asked.local, asked.placements
    ):
        router = RouterConfig(placement=placement, local_prefill_tokens=local)
        setup = Setup(n_prefill=n, n_decode=n, n_blocks=n_blocks, router=router)
        figures = play(setup, paced(visits, load, n, setup.cost))
        runs.append(Run(name=name, load=load, setup=setup, bound=bound(visits, setup.cost).hit_rate, figures=figures))
        print(runs[-1].row(), flush=True)
    if asked.json is not None:
        asked.json.write_bytes(msgspec.json.format(msgspec.json.encode(runs), indent=1) + b"\n")
    return 0


def _loads(asked: argparse.Namespace) -> Iterator[tuple[str, list[Visit]]]:
    n = asked.rows or 2000
    made: dict[str, Callable[[], list[Visit]]] = {
        "trace": lambda: trace_load(read_trace(asked.trace)[: asked.rows or None]),
        "prefix": lambda: one_prefix(n),
        "bursts": lambda: bursts(n),
    }
    for case in asked.cases:
        yield case, made[case]()


if __name__ == "__main__":
    sys.exit(main())
