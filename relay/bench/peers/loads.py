"""The loads that every server gets: what `relay bench` is told, and the figures that are read from what it says.

A seed belongs to a round and a load: all servers get the same prompts, and none gets a prompt twice.
"""

from collections.abc import Callable
from typing import Any, Final

import msgspec

PROMPT_TOKENS: Final = 105
OUTPUT_TOKENS: Final = 64
LONG_PROMPT_TOKENS: Final = 2000
STREAMS: Final = 16
CONTEXT: Final = 2560
_AFTER_LONG_PROMPT: Final = 4  # so that a first text comes although a token may have none

Report = dict[str, Any]


class Figure(msgspec.Struct, frozen=True):
    """`key` is stable. read: None where the report has no such thing, since all failed."""

    key: str
    name: str
    more_is_better: bool
    read: Callable[[Report], float | None]


def _middle(name: str) -> Callable[[Report], float | None]:
    return lambda report: float(report[name]["p50"]) if report[name] else None


def _prefill_rate(report: Report) -> float | None:
    return report["prompt_tokens"] / report["requests"]["ok"] / report["ttft_ms"]["p50"] * 1e3 if report["ttft_ms"] else None


TTFT: Final = Figure("ttft", "TTFT, ms", False, _middle("ttft_ms"))
TPOT: Final = Figure("tpot", "TPOT, ms", False, _middle("tpot_ms"))
RATE: Final = Figure("rate", "tokens/s", True, lambda report: report["output_tokens_per_s"] or None)
PREFILL: Final = Figure("prefill", "prompt tokens/s", True, _prefill_rate)


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """`competitors`: processes that spin beside it."""

    key: str
    name: str
    streams: int
    requests: int
    figures: tuple[Figure, ...]
    prompt_tokens: int = PROMPT_TOKENS
    output_tokens: int = OUTPUT_TOKENS
    competitors: int = 0

    def arguments(self, seed: int) -> list[str]:
        """Of `relay bench`, without the URL."""
        return (
            f"--concurrency {self.streams} --requests {self.requests} --prompt-tokens {self.prompt_tokens} "
            f"--output-tokens {self.output_tokens} --sampling greedy --seed {seed}"
        ).split()


WARM_UP: Final = Load(key="warm-up", name="warm-up", streams=STREAMS, requests=STREAMS, output_tokens=16, figures=())
LOADS: Final = (
    Load(key="single", name="1 stream", streams=1, requests=6, figures=(TTFT, TPOT)),
    Load(key="four", name="4 streams", streams=4, requests=12, figures=(RATE,)),
    Load(key="sixteen", name=f"{STREAMS} streams", streams=STREAMS, requests=2 * STREAMS, figures=(RATE,)),
    Load(
        key="prefill",
        name=f"{LONG_PROMPT_TOKENS}-token prompt",
        streams=1,
        requests=3,
        prompt_tokens=LONG_PROMPT_TOKENS,
        output_tokens=_AFTER_LONG_PROMPT,
        figures=(PREFILL,),
    ),
    Load(key="competed", name="1 stream beside a busy process", streams=1, requests=4, competitors=1, figures=(RATE, TPOT)),
)


def seed_of(round_number: int, load: Load) -> int:
    """Of the prompts, equal for all servers."""
    return 1000 * (round_number + 1) + [known.key for known in LOADS].index(load.key)
