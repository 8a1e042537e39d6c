"""The list of models, as the official client reads it."""

import json

import openai.types

from relay.openai.models import Model, model_card, model_list

MODEL = Model(id="smollm2", created=1700000000, max_model_len=8192)


def test_the_official_client_reads_a_card() -> None:
    card = openai.types.Model.model_validate_json(model_card(MODEL), strict=True)
    assert (card.id, card.object, card.created, card.owned_by) == ("smollm2", "model", 1700000000, "relayserve")
    assert card.model_extra == {"max_model_len": 8192}


def test_the_list_holds_the_cards() -> None:
    found = json.loads(model_list([MODEL]))
    assert found["object"] == "list"
    assert found["data"] == [json.loads(model_card(MODEL))]
