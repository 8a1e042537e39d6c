"""The loads that every server gets: what `relay bench` is told, and the figures that are read from what it says.

A seed is of a round and a scenario, so all servers get the same prompts and none gets a prompt twice.
"""

from collections.abc import Callable
from typing import Any, Final

import msgspec

PROMPT_TOKENS: Final = 105
OUTPUT_TOKENS: Final = 64
LONG_PROMPT_TOKENS: Final = 2000
_AFTER_LONG_PROMPT: Final = 4  # so that the first text comes although a token may have none


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """What is read from a report: `key` is stable. read: None where a report has no such thing, since all failed."""

    key: str
    name: str
    unit: str
    higher_is_better: bool
    read: Callable[[dict[str, Any]], float | None]


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """`requests` in a whole run, `quick_requests` in a quick one."""

    key: str
    name: str
    streams: int
    requests: int
    quick_requests: int
    prompt_tokens: int = PROMPT_TOKENS
    output_tokens: int = OUTPUT_TOKENS
    competitors: int = 0
    figures: tuple[Figure, ...]

    def arguments(self, *, seed: int, quick: bool) -> list[str]:
        """Of `relay bench`, without the URL."""
        options = {
            "concurrency": self.streams,
            "requests": self.quick_requests if quick else self.requests,
            "warmup": 1,
            "seed": seed,
            "prompt-tokens": self.prompt_tokens,
            "output-tokens": self.output_tokens,
            "sampling": "greedy",
        }
        return [part for name, value in options.items() for part in (f"--{name}", str(value))]


def _ttft(report: dict[str, Any]) -> float | None:
    return _middle(report, "ttft_ms")


def _tpot(report: dict[str, Any]) -> float | None:
    return _middle(report, "tpot_ms")


def _rate(report: dict[str, Any]) -> float | None:
    return report["output_tokens_per_s"] or None


def _decode_rate(report: dict[str, Any]) -> float | None:
    tpot = _tpot(report)
    return 1000.0 / tpot if tpot else None


def _prefill_rate(report: dict[str, Any]) -> float | None:
    ttft = _ttft(report)
    return LONG_PROMPT_TOKENS / ttft * 1000.0 if ttft else None


def _middle(report: dict[str, Any], name: str) -> float | None:
    found = report[name]
    return float(found["p50"]) if found else None


_RATE: Final = Figure(key="rate", name="output", unit="tokens/s", higher_is_better=True, read=_rate)
SCENARIOS: Final = (
    Scenario(
        key="single",
        name="1 stream",
        streams=1,
        requests=6,
        quick_requests=3,
        figures=(
            Figure(key="ttft", name="TTFT", unit="ms", higher_is_better=False, read=_ttft),
            Figure(key="tpot", name="TPOT", unit="ms", higher_is_better=False, read=_tpot),
        ),
    ),
    Scenario(key="four", name="4 streams", streams=4, requests=12, quick_requests=8, figures=(_RATE,)),
    Scenario(key="sixteen", name="16 streams", streams=16, requests=32, quick_requests=16, figures=(_RATE,)),
    Scenario(
        key="prefill",
        name=f"prompt of {LONG_PROMPT_TOKENS} tokens",
        streams=1,
        requests=3,
        quick_requests=1,
        prompt_tokens=LONG_PROMPT_TOKENS,
        output_tokens=_AFTER_LONG_PROMPT,
        figures=(Figure(key="rate", name="prefill", unit="tokens/s", higher_is_better=True, read=_prefill_rate),),
    ),
    Scenario(
        key="competed",
        name="1 stream beside a busy process",
        streams=1,
        requests=4,
        quick_requests=2,
        competitors=1,
        figures=(Figure(key="rate", name="decode", unit="tokens/s", higher_is_better=True, read=_decode_rate),),
    ),
)


def seed_of(round_number: int, scenario: Scenario) -> int:
    """Of the prompts, equal for all servers."""
    return 1000 * (round_number + 1) + SCENARIOS.index(scenario)
