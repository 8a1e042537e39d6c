"""What is said of many measured values."""

from collections.abc import Sequence

import msgspec
import numpy as np


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """Percentiles interpolate between neighbours, as numpy's default does."""

    n: int
    mean: float
    p50: float
    p90: float
    p99: float
    min: float
    max: float


def distribution(values: Sequence[float]) -> Distribution | None:
    """None of no values."""
    if not len(values):
        return None
    array = np.asarray(values, dtype=np.float64)
    p50, p90, p99 = (round(float(value), 4) for value in np.percentile(array, (50, 90, 99)))
    return Distribution(
        n=len(array),
        mean=round(float(array.mean()), 4),
        p50=p50,
        p90=p90,
        p99=p99,
        min=round(float(array.min()), 4),
        max=round(float(array.max()), 4),
    )
