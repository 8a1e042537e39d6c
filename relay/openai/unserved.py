"""Fields of OpenAI, vLLM, SGLang and llama.cpp that would change an answer and are not served here: refused, never ignored in silence.

Each may be sent with a value that asks for nothing (`neutral`). Fields that change no answer (user, metadata, store, service_tier, ...)
are not listed and pass unread.
"""

from typing import Any

from relay.errors import InvalidRequest
from relay.openai.body import shown
from relay.openai.fields import Fields

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    # structured output
    "grammar": ("",),
    "json_schema": ({},),
    "regex": (),
    "ebnf": (),
    "structural_tag": (),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    # tools of the older kind, other modalities
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"], []),
    "audio": (),
    "web_search_options": (),
    # the prompt
    "chat_template": (),
    "documents": ([],),
    "prompt_embeds": (),
    "truncate_prompt_tokens": (),
    # the choice of tokens
    "bad_words": ([],),
    "allowed_token_ids": (),
    "logits_processors": ([],),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "repeat_penalty": (1,),
    "mirostat": (0,),
    "typical_p": (1,),
    "tfs_z": (1,),
    "top_a": (0,),
    "xtc_probability": (0,),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "n_predict": (-1,),
    # the shape of the answer
    "prompt_logprobs": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
}
CHAT = _NEUTRAL | {"echo": (False,), "best_of": (1,), "add_special_tokens": (False,)}
COMPLETION = _NEUTRAL | {"suffix": ("",), "add_special_tokens": (True,)}
_INSTEAD = {
    "repeat_penalty": "use `repetition_penalty`",
    "n_predict": "use `max_tokens`",
    "prompt_logprobs": "use /v1/completions with `echo` and `logprobs`",
    "echo": "use /v1/completions",
    "best_of": "use `n`",
}


def refuse_unserved(fields: Fields, neutral: dict[str, tuple[Any, ...]]) -> None:
    """`neutral` is CHAT or COMPLETION. Raises InvalidRequest for the first field that asks for what is not served."""
    for name, values in neutral.items():
        value = fields.get(name)
        if value is not None and value not in values:
            raise InvalidRequest(f"`{name}` is not served here; {_INSTEAD.get(name, 'leave it out')}", param=name)
    _refuse_tools(fields)
    _refuse_formats(fields)


def _refuse_tools(fields: Fields) -> None:
    tools = fields.array("tools", 1024)
    choice = fields.get("tool_choice")
    if choice not in (None, "none", "auto"):
        raise InvalidRequest(f'`tool_choice` is {shown(choice)}; tool calls are not served here: send "none"', param="tool_choice")
    if tools and choice != "none":
        raise InvalidRequest('`tools`: tool calls are not served here; leave them out, or send `tool_choice`: "none"', param="tools")


def _refuse_formats(fields: Fields) -> None:
    form = fields.object("response_format")
    if form is not None and form.get("type") != "text":
        raise form.wrong("type", '"text"; other formats are not served here')
