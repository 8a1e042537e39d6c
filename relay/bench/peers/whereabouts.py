"""Where the time of our own requests went: the ledgers of a run's requests, as means for each span and each token.

    before the first token    milliseconds of each span up to the first byte, mean over requests
    for each token after it   microseconds of each span from there on, over the tokens that followed

Both sum to what the gateway saw; what the client saw beyond is its own and the network's. CPU time is by process, over tokens of the run.
"""

import json
import urllib.error
import urllib.request
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec

_MOST_REQUESTS: Final = 64


class Whereabouts(msgspec.Struct, frozen=True, kw_only=True):
    """Of one server under one load, over all rounds; spans that took nothing are left out."""

    contestant: str
    scenario: str
    requests: int
    first_token_ms: dict[str, float]
    each_token_us: dict[str, float]
    cpu_us_per_token: dict[str, float]


def fetch_ledgers(url: str, request_ids: Iterable[str]) -> list[dict[str, Any]]:
    """Those that the server still has, of the first so many."""
    found = []
    for request_id in list(request_ids)[:_MOST_REQUESTS]:
        try:
            with urllib.request.urlopen(f"{url}/v1/requests/{request_id}/ledger", timeout=10) as answer:
                found.append(json.loads(answer.read()))
        except (urllib.error.URLError, OSError, ValueError):
            continue
    return found


def gather(
    contestant: str, scenario: str, ledgers: Sequence[dict[str, Any]], cpu_s: Sequence[dict[str, float]], output_tokens: int
) -> Whereabouts | None:
    """None without a ledger. `cpu_s`: of each round, by process; `output_tokens` came in all of them."""
    whole = [ledger for ledger in ledgers if ledger.get("ttft_ns") and ledger.get("completion_tokens")]
    if not whole:
        return None
    first: dict[str, float] = {}
    later: dict[str, float] = {}
    for ledger in whole:
        for name, ns in ledger["ttft_spans"].items():
            first[name] = first.get(name, 0.0) + ns
        for name, ns in ledger["spans"].items():
            later[name] = later.get(name, 0.0) + ns - ledger["ttft_spans"].get(name, 0)
    n_later = sum(ledger["completion_tokens"] - 1 for ledger in whole)
    cpu: dict[str, float] = {}
    for by_process in cpu_s:
        for name, seconds in by_process.items():
            cpu[name] = cpu.get(name, 0.0) + seconds
    return Whereabouts(
        contestant=contestant,
        scenario=scenario,
        requests=len(whole),
        first_token_ms=_kept({name: ns / len(whole) / 1e6 for name, ns in first.items()}),
        each_token_us=_kept({name: ns / n_later / 1e3 for name, ns in later.items()} if n_later else {}),
        cpu_us_per_token=_kept({name: seconds * 1e6 / output_tokens for name, seconds in cpu.items()} if output_tokens else {}),
    )


def _kept(values: dict[str, float]) -> dict[str, float]:
    """Largest first."""
    kept = {name: round(value, 3) for name, value in values.items() if round(value, 3) > 0}
    return dict(sorted(kept.items(), key=lambda item: -item[1]))
