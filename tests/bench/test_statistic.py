"""Percentiles of known values."""

from relay.bench.statistic import Distribution, distribution


def test_percentiles_of_one_to_a_hundred_and_one() -> None:
    values = [float(value) for value in range(101, 0, -1)]
    assert distribution(values) == Distribution(n=101, mean=51.0, p50=51.0, p90=91.0, p99=100.0, min=1.0, max=101.0)


def test_percentiles_interpolate() -> None:
    found = distribution([1.0, 2.0])
    assert found is not None
    assert (found.p50, found.p90) == (1.5, 1.9)


def test_nothing_has_no_distribution() -> None:
    assert distribution([]) is None
