"""The `prompt` of a completion: a string, an array of strings, an array of token ids, or an array of such arrays; out come the prompts.

An empty prompt is refused: a model without a beginning-of-text token has nothing to start from.
"""

from typing import Any

from relay.errors import InvalidRequest
from relay.openai.fields import Fields, wrong
from relay.openai.options import refuse_non_ids

Prompt = str | tuple[int, ...]

_FORMS = "a string, an array of strings, an array of token ids, or an array of arrays of token ids"


def read_prompts(fields: Fields) -> tuple[Prompt, ...]:
    """At least one prompt, none of them empty; ids are not yet known to be the model's. Raises InvalidRequest."""
    match fields.get("prompt"):
        case "" | []:
            raise InvalidRequest("`prompt` is empty; expected at least one character or token id", param="prompt")
        case str() as text:
            return (text,)
        case [str(), *_] as texts:
            return tuple(_text(f"prompt[{i}]", text) for i, text in enumerate(texts))
        case [list(), *_] as arrays:
            return tuple(_ids(f"prompt[{i}]", ids) for i, ids in enumerate(arrays))
        case [*ids]:
            return (_ids("prompt", ids),)
        case _:
            raise fields.wrong("prompt", _FORMS)


def _text(at: str, text: Any) -> str:
    if isinstance(text, str) and text:
        return text
    raise wrong(at, "a string of at least one character, as the first of the array is", text)


def _ids(at: str, ids: Any) -> tuple[int, ...]:
    if not isinstance(ids, list) or not ids:
        raise wrong(at, "an array of at least one token id, as the first of the array is", ids)
    refuse_non_ids(at, ids)
    return tuple(ids)
