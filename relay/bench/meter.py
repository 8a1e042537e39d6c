"""What the generator says of itself: the CPU that it took and how late its own loop was. A figure made by a late generator is none."""

import time
from pathlib import Path

import msgspec
import trio

from relay.bench.statistic import distribution

_TICK_S = 0.05
_MOST_CPU_SHARE = 0.85
_MOST_LAG_MS = 10.0  # or a tenth of a typical TPOT, whichever is more


class Generator(msgspec.Struct, frozen=True, kw_only=True):
    """`lag` is how much later than asked the loop woke; `waited_for_core_share` is time it was ready to run and another process had the
    core, as a share of the measurement (None where the kernel does not tell)."""

    saturated: bool
    reason: str
    cpu_share: float
    cpu_us_per_token: float | None
    lag_p50_ms: float
    lag_p99_ms: float
    lag_max_ms: float
    waited_for_core_share: float | None


class Meter:
    """Runs beside the load; `read` at its end."""

    def __init__(self) -> None:
        self._lags_s: list[float] = []
        self._began_s = trio.current_time()
        self._cpu_s = time.process_time()
        self._delay_ns = _run_delay_ns()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            due = trio.current_time() + _TICK_S
            await trio.sleep_until(due)
            self._lags_s.append(trio.current_time() - due)

    def read(self, tokens: int, tpot_ms: float) -> Generator:
        """Since it was made; `tokens` came in that time, at typically `tpot_ms`, which says what lag would show in the figures."""
        wall_s = max(trio.current_time() - self._began_s, 1e-9)
        cpu_s = time.process_time() - self._cpu_s
        lag = distribution([lag * 1e3 for lag in self._lags_s])
        delay_ns = _run_delay_ns()
        waited = None if delay_ns is None or self._delay_ns is None else round((delay_ns - self._delay_ns) / 1e9 / wall_s, 4)
        cpu_share, p99 = cpu_s / wall_s, lag.p99 if lag else 0.0
        reason = _saturation(cpu_share, p99, waited or 0.0, tpot_ms)
        return Generator(
            saturated=bool(reason),
            reason=reason,
            cpu_share=round(cpu_share, 4),
            cpu_us_per_token=round(cpu_s * 1e6 / tokens, 2) if tokens else None,
            lag_p50_ms=lag.p50 if lag else 0.0,
            lag_p99_ms=p99,
            lag_max_ms=lag.max if lag else 0.0,
            waited_for_core_share=waited,
        )


def _saturation(cpu_share: float, lag_p99_ms: float, waited: float, tpot_ms: float) -> str:
    """Why the figures cannot be trusted; empty if they can."""
    if cpu_share > _MOST_CPU_SHARE:
        return f"it used {cpu_share:.0%} of a core"
    if lag_p99_ms > max(_MOST_LAG_MS, tpot_ms / 10):
        others = f"; it waited for a core {waited:.0%} of the time, which others had" if waited > 0.05 else ""
        return f"its loop was {lag_p99_ms:.0f} ms late at p99{others}"
    return ""


def _run_delay_ns() -> int | None:
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return None
