"""`GET /v1/models` and `GET /v1/models/{id}`: the served model in, JSON out."""

from collections.abc import Sequence
from typing import Literal

import msgspec

from relay.openai.jsontext import json_value


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """`created` is Unix time in seconds; `max_model_len` is tokens of prompt and answer together."""

    id: str
    created: int
    max_model_len: int
    object: Literal["model"] = "model"
    owned_by: str = "relayserve"


class _List(msgspec.Struct, frozen=True):
    data: list[Model]
    object: Literal["list"] = "list"


def model_list(models: Sequence[Model]) -> bytes:
    return json_value(_List(list(models)))


def model_card(model: Model) -> bytes:
    return json_value(model)
