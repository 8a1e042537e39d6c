"""Lengths: how they are read, and what is drawn."""

import random
import statistics

import pytest

from relay.bench.lengths import parse_lengths


@pytest.mark.parametrize("text", ["128", "64:256", "lognormal:128:0.8", "lognormal:128:0.8:1024"])
def test_lengths_print_as_they_were_written(text: str) -> None:
    assert str(parse_lengths(text)) == text


@pytest.mark.parametrize("text", ["", "0", "-5", "5:4", "a", "1.5", "lognormal:5", "lognormal:0:1", "1:2:3"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no length"):
        parse_lengths(text)


def test_a_uniform_range_has_both_ends_in() -> None:
    source = random.Random(1)
    assert {parse_lengths("3:5").draw(source) for _ in range(200)} == {3, 4, 5}


def test_lognormal_has_its_median_and_its_cap() -> None:
    source = random.Random(1)
    drawn = [parse_lengths("lognormal:100:1:400").draw(source) for _ in range(4000)]
    assert 93 < statistics.median(drawn) < 107
    assert max(drawn) == 400
    assert min(drawn) >= 1
    assert statistics.quantiles(drawn, n=100)[83] == pytest.approx(100 * 2.718, rel=0.1)  # one sigma up
