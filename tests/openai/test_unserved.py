"""The table of fields that are refused unless they ask for nothing."""

from typing import Any

import pytest

from relay.errors import InvalidRequest
from relay.openai.fields import Fields
from relay.openai.unserved import CHAT, COMPLETION, refuse_unserved


@pytest.mark.parametrize("neutral", [CHAT, COMPLETION])
def test_each_of_them_is_refused_with_a_value_and_passes_with_a_neutral_one(neutral: dict[str, tuple[Any, ...]]) -> None:
    for name, values in neutral.items():
        for value in (None, *values):
            refuse_unserved(Fields({name: value}), neutral)
        with pytest.raises(InvalidRequest, match="not served here") as refused:
            refuse_unserved(Fields({name: {"anything": 1}}), neutral)
        assert refused.value.param == name
