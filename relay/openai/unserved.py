"""Fields of OpenAI, vLLM, SGLang, llama.cpp, Ollama and TGI that would change an answer and are not served here: refused, never ignored.

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
    "input_ids": (),
    "n_keep": (0,),
    # the model
    "lora_path": (),
    "lora": ([],),
    # the choice of tokens
    "custom_logit_processor": (),
    "vllm_xargs": ({},),
    "samplers": (),
    "top_n_sigma": (-1, 0),
    "adaptive_target": (-1, 0),
    "repeat_last_n": (-1,),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "do_sample": (True,),
    "options": ({},),
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
    # the end
    "num_predict": (-1,),
    "max_new_tokens": (),
    "max_length": (),
    "t_max_predict_ms": (-1, 0),
    "thinking_token_budget": (),
    "repetition_detection": (),
    "stop_sequences": ([],),
    "stop_regex": (),
    "no_stop_trim": (False,),
    # the shape of the answer
    "prompt_logprobs": (),
    "return_token_ids": (False,),
    "return_hidden_states": (False,),
    "logprob_token_ids": ([],),
    "n_probs": (0,),
    "return_tokens_as_token_ids": (False,),
}
CHAT = _NEUTRAL | {"echo": (False,), "best_of": (1,), "add_special_tokens": (False,)}
COMPLETION = _NEUTRAL | {"suffix": ("",), "add_special_tokens": (True,)}
_INSTEAD = {
    "repeat_penalty": "use `repetition_penalty`",
    "n_predict": "use `max_tokens`",
    "num_predict": "use `max_tokens`",
    "max_new_tokens": "use `max_tokens`",
    "max_length": "use `max_tokens`",
    "options": "send its fields in the body itself",
    "do_sample": "use `temperature`: 0",
    "stop_sequences": "use `stop`",
    "no_stop_trim": "use `include_stop_str_in_output`",
    "n_probs": "use `logprobs`",
    "t_max_predict_ms": "send the header X-Request-Timeout",
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
