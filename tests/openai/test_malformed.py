"""Every body that cannot be served is refused with InvalidRequest that names the field, and no body does anything else."""

import json
import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relay.errors import InvalidRequest
from relay.openai.body import MAX_CONTAINERS, MAX_DEPTH, shape
from relay.openai.chat import parse_chat
from relay.openai.completion import parse_completion

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION: dict[str, Any] = {"model": "m", "prompt": "hi"}
VOCAB = 49152

BYTES: list[tuple[str, bytes, str | None, str]] = [
    ("empty body", b"", None, "the body is empty"),
    ("only spaces", b" \n\t ", None, "the body is empty"),
    ("null", b"null", None, "the body is null; expected a JSON object"),
    ("an array", b"[]", None, "the body is an array of 0; expected a JSON object"),
    ("a string", b'"x"', None, 'the body is "x"; expected a JSON object'),
    ("a number", b"12.5", None, "the body is 12.5; expected a JSON object"),
    ("two byte order marks", b"\xef\xbb\xbf\xef\xbb\xbf{}", None, "not valid JSON"),
    ("utf-16", '{"prompt":"x"}'.encode("utf-16"), None, "UTF-16 or UTF-32; JSON is sent as UTF-8"),
    ("utf-16 without a mark", '{"prompt":"x"}'.encode("utf-16-be"), None, "UTF-16 or UTF-32; JSON is sent as UTF-8"),
    ("cut short", b'{"prompt": "x', None, "not valid JSON"),
    ("two documents", b'{"prompt":"x"} {}', None, "trailing characters"),
    ("trailing comma", b'{"prompt":"x",}', None, "not valid JSON"),
    ("single quotes", b"{'prompt':'x'}", None, "not valid JSON"),
    ("comment", b'{"prompt":"x"} // hi', None, "not valid JSON"),
    ("NaN", b'{"prompt":"x","temperature":NaN}', None, "not valid JSON"),
    ("Infinity", b'{"prompt":"x","temperature":Infinity}', None, "not valid JSON"),
    ("-Infinity", b'{"prompt":"x","temperature":-Infinity}', None, "not valid JSON"),
    ("1e999", b'{"prompt":"x","temperature":1e999}', None, "out of range"),
    ("5000 digits", b'{"prompt":"x","max_tokens":' + b"9" * 5000 + b"}", None, "out of range"),
    ("4299 digits", b'{"prompt":"x","max_tokens":' + b"9" * 4299 + b"}", "max_tokens", "an integer of 14281 bits; expected an integer"),
    ("invalid UTF-8", b'{"prompt":"\xff"}', None, "Invalid UTF-8"),
    ("overlong UTF-8", b'{"prompt":"\xc0\x80"}', None, "Invalid UTF-8"),
    ("UTF-8 surrogate", b'{"prompt":"\xed\xa0\xbd"}', None, "Invalid UTF-8"),
    ("control character", b'{"prompt":"\x01"}', None, "not valid JSON"),
    ("lone high surrogate at the end", b'{"prompt":"x \\ud83d"}', None, "needs its low half"),
    ("lone high surrogate inside", b'{"prompt":"x \\ud83d and more text"}', None, "needs its low half"),
    ("two high surrogates", b'{"prompt":"\\ud83d\\ud83d"}', None, "needs its low half"),
    ("lone low surrogate", b'{"prompt":"\\udc00"}', None, "surrogate"),
    ("surrogate in a key", b'{"\\ud83d":1}', None, "needs its low half"),
    ("1000 arrays deep", b'{"prompt":' + b"[" * 1000 + b"]" * 1000 + b"}", None, "too deep"),
    ("objects deep", b'{"metadata":' * 65 + b"1" + b"}" * 65, None, "too deep"),
    ("depth bomb", b"[" * 1_000_000, None, "arrays and objects"),
    ("unclosed depth bomb", b'{"a":' * 30_000, None, "too deep"),
    ("many containers", b'{"a":[' + b"[]," * MAX_CONTAINERS + b"[]]}", None, "arrays and objects"),
    ("many keys", b"{" + b",".join(b'"k%d":1' % i for i in range(70_000)) + b"}", None, "keys"),
    ("many strings", b'{"prompt":["' + b'","' * 140_000 + b'"]}', None, "strings"),
    ("many values", b'{"prompt":[' + b"1," * 1_100_000 + b"1]}", None, "values"),
    ("key twice deep inside", b'{"a":[1,{"b":[{"c":1,"c":2}]}]}', "c", "twice"),
    ("key twice", b'{"prompt":"x","max_tokens":1,"max_tokens":2}', "max_tokens", "twice"),
    ("key twice, once escaped", b'{"prompt":"x","\\u0070rompt":"y"}', "prompt", "twice"),
    ("key twice inside", b'{"prompt":"x","logit_bias":{"1":1,"1":2}}', "1", "twice"),
]

BOTH: list[tuple[dict[str, Any], str, str]] = [
    ({"model": 5}, "model", "`model` is 5; expected a string"),
    ({"model": ""}, "model", "the name of a model"),
    ({"model": "x" * 257}, "model", "a string of 257 characters"),
    ({"stream": "true"}, "stream", '`stream` is "true"; expected true or false'),
    ({"stream": 1}, "stream", "expected true or false"),
    ({"stream_options": {}}, "stream_options", "without `stream`"),
    ({"stream_options": {"include_usage": True}, "stream": False}, "stream_options", "without `stream`"),
    ({"stream_options": [], "stream": True}, "stream_options", "expected an object"),
    ({"stream_options": {"include_usage": 1}, "stream": True}, "stream_options.include_usage", "true or false"),
    ({"stream_options": {"continuous_usage_stats": "no"}, "stream": True}, "stream_options.continuous_usage_stats", "true or false"),
    ({"max_tokens": 0}, "max_tokens", "`max_tokens` is 0; expected an integer from 1"),
    ({"max_tokens": -1}, "max_tokens", "is -1"),
    ({"max_tokens": "5"}, "max_tokens", '`max_tokens` is "5"; expected an integer'),
    ({"max_tokens": 1.5}, "max_tokens", "is 1.5"),
    ({"max_tokens": True}, "max_tokens", "is true"),
    ({"max_tokens": 2**31}, "max_tokens", "is 2147483648"),
    ({"max_tokens": [5]}, "max_tokens", "is an array of 1"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "expected an integer from 1"),
    ({"max_completion_tokens": 5, "max_tokens": 6}, "max_completion_tokens", "send one of them"),
    ({"min_tokens": -1}, "min_tokens", "is -1"),
    ({"min_tokens": 6, "max_tokens": 5}, "min_tokens", "at most `max_tokens`, which is 5"),
    ({"ignore_eos": "yes"}, "ignore_eos", "true or false"),
    ({"stop": ""}, "stop", '`stop` is ""; expected a string of 1 to'),
    ({"stop": [letter * 1000 for letter in "abcde"]}, "stop", "5000 characters in all; at most 4096"),
    ({"stop": ["a", ""]}, "stop[1]", "expected a string of 1 to"),
    ({"stop": ["a", None]}, "stop[1]", "is null"),
    ({"stop": [1]}, "stop[0]", "is 1"),
    ({"stop": 5}, "stop", "a string or an array of at most 16"),
    ({"stop": {"a": 1}}, "stop", "is an object"),
    ({"stop": [str(i) for i in range(17)]}, "stop", "an array of 17"),
    ({"stop": "x" * 1025}, "stop", "a string of 1025 characters"),
    ({"stop_token_ids": 2}, "stop_token_ids", "expected an array"),
    ({"stop_token_ids": [2, -1]}, "stop_token_ids[1]", "is -1"),
    ({"stop_token_ids": [True]}, "stop_token_ids[0]", "is true"),
    ({"stop_token_ids": ["2"]}, "stop_token_ids[0]", 'is "2"'),
    ({"stop_token_ids": list(range(129))}, "stop_token_ids", "an array of 129"),
    ({"include_stop_str_in_output": 0}, "include_stop_str_in_output", "true or false"),
    ({"skip_special_tokens": "x"}, "skip_special_tokens", "true or false"),
    ({"temperature": -0.1}, "temperature", "`temperature` is -0.1; expected a number from 0 to 100"),
    ({"temperature": 100.1}, "temperature", "is 100.1"),
    ({"temperature": "1"}, "temperature", 'is "1"'),
    ({"temperature": True}, "temperature", "is true"),
    ({"temperature": 10**400}, "temperature", "an integer of 1329 bits"),
    ({"top_p": -0.1}, "top_p", "a number from 0 to 1"),
    ({"top_p": 1.01}, "top_p", "is 1.01"),
    ({"top_p": []}, "top_p", "is an array"),
    ({"top_k": -2}, "top_k", "an integer from -1"),
    ({"top_k": 1.5}, "top_k", "is 1.5"),
    ({"min_p": -0.1}, "min_p", "from 0 to 1"),
    ({"min_p": 2}, "min_p", "from 0 to 1"),
    ({"seed": 2**63}, "seed", "an integer from -9223372036854775808 to 9223372036854775807"),
    ({"seed": -(2**63) - 1}, "seed", "an integer from"),
    ({"seed": "x"}, "seed", 'is "x"'),
    ({"seed": 1.5}, "seed", "is 1.5"),
    ({"n": 0}, "n", "an integer from 1 to 128"),
    ({"n": 129}, "n", "is 129"),
    ({"n": "2"}, "n", 'is "2"'),
    ({"n": False}, "n", "is false"),
    ({"repetition_penalty": 0}, "repetition_penalty", "from 0.01 to 10"),
    ({"repetition_penalty": 1e-38}, "repetition_penalty", "is 1e-38"),  # 500 for a legal value: the model's numbers overflowed
    ({"repetition_penalty": 10.5}, "repetition_penalty", "is 10.5"),
    ({"frequency_penalty": 2.1}, "frequency_penalty", "from -2 to 2"),
    ({"presence_penalty": -2.1}, "presence_penalty", "from -2 to 2"),
    ({"presence_penalty": {}}, "presence_penalty", "is an object"),
    ({"logit_bias": []}, "logit_bias", "expected an object"),
    ({"logit_bias": {"-1": 1}}, "logit_bias", 'the key "-1"'),
    ({"logit_bias": {"abc": 1}}, "logit_bias", 'the key "abc"'),
    ({"logit_bias": {"": 1}}, "logit_bias", 'the key ""'),
    ({"logit_bias": {"007": 1}}, "logit_bias", 'the key "007"'),
    ({"logit_bias": {"٣": 1}}, "logit_bias", "the key"),
    ({"logit_bias": {"1" * 5000: 1}}, "logit_bias", "a string of 5000 characters"),
    ({"logit_bias": {"5": 200}}, "logit_bias.5", "is 200; expected a number from -100 to 100"),
    ({"logit_bias": {"5": "1"}}, "logit_bias.5", 'is "1"'),
    ({"logit_bias": {"5": True}}, "logit_bias.5", "is true"),
    ({"logit_bias": {"5": None}}, "logit_bias.5", "is null"),
    ({"logit_bias": {str(i): 1 for i in range(4097)}}, "logit_bias", "4097 keys"),
    ({"priority": "x"}, "priority", '`priority` is "x"'),
    ({"priority": 0.5}, "priority", "is 0.5"),
    ({"cache_salt": 5}, "cache_salt", "is 5"),
    ({"cache_salt": "x" * 257}, "cache_salt", "at most 256 characters"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "tool calls are not served here"),
    ({"tools": {}}, "tools", "expected an array"),
    ({"tool_choice": "required"}, "tool_choice", "not served here"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "not served here"),
    ({"functions": [{"name": "f"}]}, "functions", "not served here"),
    ({"response_format": {"type": "json_object"}}, "response_format.type", '"json_object"; expected "text"'),
    ({"response_format": {}}, "response_format.type", "missing"),
    ({"response_format": "text"}, "response_format", "expected an object"),
    ({"grammar": "rout::="}, "grammar", "not served here"),
    ({"guided_json": {"type": "object"}}, "guided_json", "not served here"),
    ({"guided_regex": "a+"}, "guided_regex", "not served here"),
    ({"guided_choice": ["a"]}, "guided_choice", "not served here"),
    ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs", "not served here"),
    ({"use_beam_search": True}, "use_beam_search", "not served here"),
    ({"mirostat": 2}, "mirostat", "not served here"),
    ({"repeat_penalty": 1.1}, "repeat_penalty", "use `repetition_penalty`"),
    ({"prompt_logprobs": 1}, "prompt_logprobs", "use /v1/completions"),
    ({"max_new_tokens": 3}, "max_new_tokens", "use `max_tokens`"),  # ran to the end of the context
    ({"options": {"num_predict": 3}}, "options", "in the body itself"),
    ({"do_sample": False}, "do_sample", "use `temperature`: 0"),
    ({"stop_sequences": ["a"]}, "stop_sequences", "use `stop`"),
    *(
        ({name: value}, name, "not served here")
        for name, value in {
            "lora_path": "a",
            "lora": [{"id": 0}],
            "custom_logit_processor": "x",
            "stop_regex": "a+",
            "return_hidden_states": True,
            "input_ids": [1],
            "no_stop_trim": True,
            "samplers": ["top_k"],
            "top_n_sigma": 1.0,
            "n_keep": 4,
            "t_max_predict_ms": 10,
            "adaptive_target": 0.5,
            "repeat_last_n": 64,
            "n_probs": 2,
            "vllm_xargs": {"a": 1},
            "logprob_token_ids": [5],
            "repetition_detection": {},
            "thinking_token_budget": 5,
            "num_predict": 8,
            "no_repeat_ngram_size": 2,
            "num_beams": 4,
            "max_length": 9,
        }.items()
    ),
    ({"modalities": ["text", "audio"]}, "modalities", "not served here"),
]


def _messages(*messages: Any) -> dict[str, Any]:
    return {"messages": list(messages)}


def _content(*parts: Any) -> dict[str, Any]:
    return _messages({"role": "system", "content": "s"}, {"role": "user", "content": list(parts)})


def _call(call: Any) -> dict[str, Any]:
    return _messages({"role": "assistant", "tool_calls": [call]})


ONLY_CHAT: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": None}, "messages", "is null; expected an array of at least one message"),
    ({"messages": []}, "messages", "at least one message"),
    ({"messages": "hi"}, "messages", "expected an array"),
    ({"messages": {"role": "user"}}, "messages", "is an object"),
    (_messages("hi"), "messages[0]", "expected an object"),
    (_messages(None), "messages[0]", "is null"),
    (_messages({"content": "hi"}), "messages[0].role", "missing; expected one of system"),
    (_messages({"role": "robot", "content": "hi"}), "messages[0].role", '"robot"; expected one of system'),
    (_messages({"role": ["user"], "content": "hi"}), "messages[0].role", "is an array"),
    (_messages({"role": "user"}), "messages[0].content", "missing"),
    (_messages({"role": "user", "content": None}), "messages[0].content", "is null"),
    (_messages({"role": "user", "content": 5}), "messages[0].content", "is 5; expected a string or an array"),
    (_messages({"role": "user", "content": {"text": "a"}}), "messages[0].content", "is an object"),
    (_messages({"role": "user", "content": []}), "messages[0].content", "is an array of 0"),
    (_content("a"), "messages[1].content[0]", "expected an object"),
    (_content({"type": "text", "text": "a"}, {"type": "image_url"}), "messages[1].content[1].type", '"image_url"; expected "text"'),
    (_content({"text": "a"}), "messages[1].content[0].type", "missing"),
    (_content({"type": "text"}), "messages[1].content[0].text", "missing"),
    (_content({"type": "text", "text": 5}), "messages[1].content[0].text", "is 5"),
    (_messages({"role": "user", "content": "a", "name": 5}), "messages[0].name", "is 5"),
    (_messages({"role": "tool", "content": "a", "tool_call_id": []}), "messages[0].tool_call_id", "an array of 0"),
    (_messages({"role": "assistant", "tool_calls": {}}), "messages[0].tool_calls", "is an object"),
    (_call("f"), "messages[0].tool_calls[0]", "expected an object"),
    (_call({"type": "code"}), "messages[0].tool_calls[0].type", '"code"'),
    (_call({"id": "c"}), "messages[0].tool_calls[0].function", "missing"),
    (_call({"function": {}}), "messages[0].tool_calls[0].function.name", "missing"),
    (_call({"function": {"name": "f", "arguments": []}}), "messages[0].tool_calls[0].function.arguments", "an array of 0; expected a JSON"),
    (_call({"function": {"name": "f"}, "id": 5}), "messages[0].tool_calls[0].id", "is 5"),
    ({"logprobs": 5}, "logprobs", "true or false"),
    ({"top_logprobs": 3}, "top_logprobs", "`logprobs`: true"),
    ({"top_logprobs": 3, "logprobs": False}, "top_logprobs", "`logprobs`: true"),
    ({"top_logprobs": 21, "logprobs": True}, "top_logprobs", "from 0 to 20"),
    ({"top_logprobs": -1, "logprobs": True}, "top_logprobs", "is -1"),
    ({"top_logprobs": True, "logprobs": True}, "top_logprobs", "is true"),
    ({"echo": True}, "echo", "use /v1/completions"),
    ({"best_of": 2}, "best_of", "use `n`"),
    ({"add_generation_prompt": 1}, "add_generation_prompt", "true or false"),
    ({"continue_final_message": True}, "continue_final_message", "the role assistant"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", "both true"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs", "expected an object"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages", "the key `messages`"),
    ({"chat_template": "{{ 1 }}"}, "chat_template", "not served here"),
    ({"add_special_tokens": True}, "add_special_tokens", "not served here"),
]

ONLY_COMPLETION: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": None}, "prompt", "is null; expected a string, an array of strings"),
    ({"prompt": ""}, "prompt", "is empty"),
    ({"prompt": []}, "prompt", "is empty"),
    ({"prompt": [""]}, "prompt[0]", "at least one character"),
    ({"prompt": ["a", ""]}, "prompt[1]", "at least one character"),
    ({"prompt": [[]]}, "prompt[0]", "at least one token id"),
    ({"prompt": [[1], []]}, "prompt[1]", "at least one token id"),
    ({"prompt": 5}, "prompt", "is 5"),
    ({"prompt": {"a": 1}}, "prompt", "is an object"),
    ({"prompt": True}, "prompt", "is true"),
    ({"prompt": [-1]}, "prompt[0]", "is -1; expected a token id"),
    ({"prompt": [1, True]}, "prompt[1]", "is true"),
    ({"prompt": [1.5]}, "prompt[0]", "is 1.5"),
    ({"prompt": [1, 2.0]}, "prompt[1]", "is 2.0"),
    ({"prompt": [None]}, "prompt[0]", "is null"),
    ({"prompt": [1, "a"]}, "prompt[1]", 'is "a"'),
    ({"prompt": ["a", 1]}, "prompt[1]", "is 1; expected a string"),
    ({"prompt": [[1], "a"]}, "prompt[1]", 'is "a"; expected an array'),
    ({"prompt": ["a", [1]]}, "prompt[1]", "is an array of 1; expected a string"),
    ({"prompt": [1, [1]]}, "prompt[1]", "is an array of 1"),
    ({"prompt": [[1], [2, -3]]}, "prompt[1][1]", "is -3"),
    ({"prompt": [[[1]]]}, "prompt[0][0]", "is an array of 1"),
    ({"prompt": [{}]}, "prompt[0]", "is an object"),
    ({"prompt": ["a"] * 4097}, "prompt", "at most 4096 sequences"),
    ({"prompt": ["a"] * 33, "n": 128}, "prompt", "33 prompts for 128 choices"),
    ({"best_of": 1, "n": 2}, "best_of", "at least `n`, which is 2"),
    ({"best_of": 2, "stream": True}, "best_of", "with `stream`"),
    ({"best_of": 129}, "best_of", "from 1 to 128"),
    ({"logprobs": True}, "logprobs", "is true; expected an integer from 0 to 20"),
    ({"logprobs": 21}, "logprobs", "is 21"),
    ({"logprobs": -1}, "logprobs", "is -1"),
    ({"echo": "yes"}, "echo", "true or false"),
    ({"echo": True, "max_tokens": -1}, "max_tokens", "from 0"),
    ({"suffix": "end"}, "suffix", "not served here"),
    ({"add_special_tokens": False}, "add_special_tokens", "not served here"),
]

BEYOND_MODEL: list[tuple[dict[str, Any], str, str]] = [
    ({"stop_token_ids": [2, VOCAB]}, "stop_token_ids[1]", "is 49152; expected a token id of this model, 0 to 49151"),
    ({"logit_bias": {"49152": -100}}, "logit_bias", 'the key "49152"; token ids of this model go from 0 to 49151'),
    ({"prompt": [5279552648203111001]}, "prompt[0]", "is 5279552648203111001; expected a token id of this model"),
    ({"prompt": [10**30]}, "prompt[0]", "an integer of 100 bits"),
    ({"prompt": [49152]}, "prompt[0]", "is 49152"),
    ({"prompt": [[1], [1, 49152]]}, "prompt[1][1]", "is 49152"),
]

Parse = Callable[[bytes], Any]
TABLE: list[tuple[Parse, dict[str, Any], str, str]] = [
    *((parse_chat, CHAT | change, param, text) for change, param, text in BOTH + ONLY_CHAT),
    *((parse_completion, COMPLETION | change, param, text) for change, param, text in BOTH + ONLY_COMPLETION),
]


@pytest.mark.parametrize("parse", [parse_chat, parse_completion])
@pytest.mark.parametrize(("body", "param", "text"), [row[1:] for row in BYTES], ids=[row[0] for row in BYTES])
def test_a_body_that_is_no_sound_json_object_is_refused(parse: Parse, body: bytes, param: str | None, text: str) -> None:
    """JustVugg/colibri#1589 (a lone surrogate gave 500), raullenchai/Rapid-MLX#798 (a deep body gave 500)."""
    if parse is parse_chat:
        body = body.replace(b'"prompt":"x"', b'"messages":[{"role":"user","content":"x"}]')
        param = "role" if param == "prompt" else param
        body = body.replace(b'"\\u0070rompt":"y"', b'"a":{"role":1,"\\u0072ole":2}')
    with pytest.raises(InvalidRequest) as refused:
        parse(body)
    assert refused.value.param == param
    assert text in refused.value.message
    assert len(refused.value.message) < 300


@pytest.mark.parametrize(("parse", "body", "param", "text"), TABLE)
def test_a_field_that_cannot_be_served_is_refused_by_name(parse: Parse, body: dict[str, Any], param: str, text: str) -> None:
    """vllm#16529 and sglang#7670 (logit_bias), vllm#26797 and vllm#9634 (ids), vllm#7283 (empty prompts), vllm#6707 (max_tokens),
    vllm#5008 (top_logprobs without logprobs), vllm#9342 (priority), llama.cpp#4492 (grammar)."""
    with pytest.raises(InvalidRequest) as refused:
        parse(json.dumps(body).encode())
    assert refused.value.param == param
    assert text in refused.value.message
    assert len(refused.value.message) < 300
    assert refused.value.status == 400


@pytest.mark.parametrize(("change", "param", "text"), BEYOND_MODEL)
def test_an_id_that_the_model_does_not_have_is_refused_once_the_model_is_known(change: dict[str, Any], param: str, text: str) -> None:
    """vllm#16529 (a bias), vllm#26797 and vllm#9634 (a prompt: 49151 is the last id of SmolLM2)."""
    request = parse_completion(json.dumps(COMPLETION | change).encode())
    request.check(2**100)
    with pytest.raises(InvalidRequest) as refused:
        request.check(VOCAB)
    assert refused.value.param == param
    assert text in refused.value.message


_FIELDS = sorted({key for change, _, _ in BOTH + ONLY_CHAT + ONLY_COMPLETION for key in change} | {"prompt", "messages", "user"})


@pytest.mark.parametrize(("parse", "base"), [(parse_chat, CHAT), (parse_completion, COMPLETION)])
def test_null_is_the_same_as_absent_in_every_field_that_may_be_absent(parse: Parse, base: dict[str, Any]) -> None:
    assert parse(json.dumps(dict.fromkeys(_FIELDS) | base).encode()) == parse(json.dumps(base).encode())


def test_nesting_is_measured_outside_strings_and_to_the_level() -> None:
    def nested(levels: int) -> bytes:
        return b'{"prompt":"x","a":' + b"[" * (levels - 1) + b"]" * (levels - 1) + b"}"

    parse_completion(nested(MAX_DEPTH))
    with pytest.raises(InvalidRequest, match="too deep"):
        parse_completion(nested(MAX_DEPTH + 1))
    parse_completion(msgspec.json.encode({"prompt": '[{"\\' * MAX_CONTAINERS}))
    parse_completion(msgspec.json.encode({"prompt": [[1]] * 4096}))


@pytest.mark.parametrize("end", [b"", b"\\", b'"', b'"]}'])
def test_a_string_full_of_escaped_quotes_is_looked_at_once(end: bytes) -> None:
    """A pattern that tried again behind each quote took 6 s for 32 KB, hours for this."""
    evil = b'{"a":' + b"[" * (MAX_DEPTH + 1) + b'"' + b'\\"' * (1 << 19) + end
    program = "import sys; from relay.openai.body import parse_object; parse_object(sys.stdin.buffer.read())"
    ended = subprocess.run([sys.executable, "-c", program], input=evil, capture_output=True, timeout=120)
    assert b"InvalidRequest" in ended.stderr


_PLAIN = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["user", "text", "none", "5", 1, 0])
)
_NAMES = (
    st.sampled_from(["role", "content", "type", "text", "tool_calls", "function", "name", "arguments", "include_usage", "7"]) | st.text()
)
_VALUES = st.recursive(_PLAIN, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_NAMES, inner, max_size=4), max_leaves=12)


def _brackets_and_keys(value: Any) -> tuple[str, int]:
    match value:
        case dict():
            inner = [_brackets_and_keys(each) for each in value.values()]
            return f"[{''.join(text for text, _ in inner)}]", len(value) + sum(n for _, n in inner)
        case list():
            inner = [_brackets_and_keys(each) for each in value]
            return f"[{''.join(text for text, _ in inner)}]", sum(n for _, n in inner)
        case _:
            return "", 0


@settings(deadline=None)
@given(st.recursive(st.text('ab"\\[]{}:,\n'), lambda inner: st.lists(inner) | st.dictionaries(st.text('a"\\:{'), inner), max_leaves=20))
def test_the_look_at_a_body_in_pieces_sees_what_is_outside_its_strings(value: Any) -> None:
    brackets, n_keys = _brackets_and_keys(value)
    body = json.dumps(value).encode()
    for piece_bytes in (2, 3, 7, 1000):
        assert shape(body, piece_bytes) == (brackets.encode(), n_keys)


def _served_or_refused(body: bytes) -> None:
    for parse in (parse_chat, parse_completion):
        outcome: Any
        try:
            outcome = parse(body)
            outcome.check(100)
        except InvalidRequest as refused:
            outcome = (refused.message, refused.param)
        assert msgspec.json.encode(outcome)


@settings(max_examples=400, deadline=None, database=None, derandomize=True)
@given(st.dictionaries(st.sampled_from(_FIELDS), _VALUES, max_size=4), st.booleans())
def test_any_values_in_known_fields_are_served_or_refused(change: dict[str, Any], chat: bool) -> None:
    """Whatever is sent, nothing but InvalidRequest comes out, and what is accepted can be encoded again."""
    _served_or_refused(json.dumps((CHAT if chat else COMPLETION) | change).encode())


def test_any_damage_to_a_body_is_served_or_refused() -> None:
    """Bytes cut out, put in and overwritten, 8,000 times."""
    pick = random.Random(5)
    changes = [(CHAT, change) for change, *_ in BOTH + ONLY_CHAT] + [(COMPLETION, change) for change, *_ in BOTH + ONLY_COMPLETION]
    bodies = [body for base, change in changes if len(body := json.dumps(base | change).encode()) < 400]
    pieces = [b'"', b"[", b"{", b"}", b"\\ud83d", b"\\", b"-", b"e9", b"null", b"\xff", b"0", b",", b":"]
    for _ in range(8000):
        body = pick.choice(bodies)
        for _ in range(pick.randint(1, 4)):
            at = pick.randrange(len(body) + 1)
            put = pick.choice(pieces) if pick.random() < 0.7 else pick.randbytes(pick.randint(0, 3))
            body = body[:at] + put + body[at + pick.randint(0, 3) :]
        _served_or_refused(body)
