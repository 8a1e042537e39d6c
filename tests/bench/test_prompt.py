"""Contents of prompts: fixed by seed and key, as long as asked for."""

from relay.bench.dialect import Calibration
from relay.bench.prompt import PromptMaker
from relay.bench.schedule import Segment


def ids(maker: PromptMaker, *segments: Segment) -> list[int]:
    made = maker.make(segments)
    assert isinstance(made, list)
    return made


def maker(seed: int = 0, calibration: Calibration | None = None) -> PromptMaker:
    return PromptMaker(seed=seed, low=1000, high=2000, calibration=calibration)


def test_a_key_has_one_run_and_a_shorter_one_is_its_beginning() -> None:
    long, short = ids(maker(), Segment("a", 500)), ids(maker(), Segment("a", 37))
    assert long[:37] == short
    assert len(long) == 500
    assert ids(maker(seed=1), Segment("a", 37)) != short
    assert ids(maker(), Segment("b", 37)) != short


def test_ids_are_spread_over_the_whole_range_and_stay_in_it() -> None:
    made = ids(maker(), Segment("a", 20_000))
    assert min(made) == 1000
    assert max(made) == 1999
    assert 950 < len(set(made)) <= 1000
    assert 1480 < sum(made) / len(made) < 1520


def test_segments_stand_one_after_the_other() -> None:
    both = ids(maker(), Segment("a", 10), Segment("b", 5))
    assert both == ids(maker(), Segment("a", 10)) + ids(maker(), Segment("b", 5))


def test_text_has_as_many_words_as_the_calibration_asks_for() -> None:
    text = maker(calibration=Calibration(tokens_per_word=2.0, added_tokens=10)).make((Segment("a", 60), Segment("b", 50)))
    assert isinstance(text, str)
    assert len(text.split()) == 50  # (110 - 10) / 2


def test_texts_with_equal_segments_have_equal_beginnings() -> None:
    texts = maker(calibration=Calibration(tokens_per_word=1.3, added_tokens=0))
    one, other = (texts.make((Segment("shared", 64), Segment(own, 64))) for own in ("a", "b"))
    assert isinstance(one, str)
    assert isinstance(other, str)
    words = round(64 / 1.3)
    assert one.split()[:words] == other.split()[:words]
    assert one.split()[words:] != other.split()[words:]
    assert len(one.split()) == round(128 / 1.3)
