"""Chat messages as clients send them, to messages as chat templates expect them.

Null or missing content becomes the empty string; content in parts becomes one string (joined by line breaks, as vLLM and llama.cpp do)
unless the template walks over parts itself; the arguments of tool calls become objects, since templates write them out as JSON. Nothing is
changed in place.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import msgspec

from relay.errors import InvalidRequest


def prepare_messages(
    messages: Sequence[dict[str, Any]], *, keep_parts: bool, wrap_strings: bool, developer_is_system: bool = False
) -> list[dict[str, Any]]:
    """Copies of the messages, fit for a template. Raises InvalidRequest, naming the field, for content that is no text.

    keep_parts: the template walks over content parts. wrap_strings: and cannot deal with a plain string. developer_is_system: it does not
    know the role developer, whose messages are the system's then; at the front they become one message with it, since many templates read
    the first only.
    """
    if developer_is_system and any(message.get("role") == "developer" for message in messages):
        messages = _with_one_system_message(messages)
    return [_message(message, f"messages[{i}]", keep_parts, wrap_strings) for i, message in enumerate(messages)]


def _with_one_system_message(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    renamed = [message | {"role": "system"} if message.get("role") == "developer" else message for message in messages]
    front = list(itertools.takewhile(lambda message: message.get("role") == "system", renamed))
    if len(front) < 2:
        return renamed
    texts = [part for i, message in enumerate(front) for part in _parts(message.get("content"), f"messages[{i}].content")]
    return [front[0] | {"content": "\n\n".join(texts)}, *renamed[len(front) :]]


def _parts(content: Any, where: str) -> list[str]:
    if isinstance(content, list):
        return [_text_of(part, f"{where}[{i}]") for i, part in enumerate(content)]
    if not isinstance(content, str):
        raise InvalidRequest(f"{where} must be a string or a list of parts", param=where)
    return [content]


def _message(message: dict[str, Any], where: str, keep_parts: bool, wrap_strings: bool) -> dict[str, Any]:
    content = message.get("content")
    if content is None:
        content = ""
    if isinstance(content, list):
        texts = [_text_of(part, f"{where}.content[{i}]") for i, part in enumerate(content)]
        content = [{"type": "text", "text": text} for text in texts] if keep_parts else "\n".join(texts)
    elif not isinstance(content, str):
        raise InvalidRequest(f"{where}.content must be a string or a list of parts, not {type(content).__name__}", param=f"{where}.content")
    if wrap_strings and isinstance(content, str):
        content = [{"type": "text", "text": content}] if content else []
    prepared = message | {"content": content}
    if message.get("tool_calls"):
        prepared["tool_calls"] = [_tool_call(call) for call in message["tool_calls"]]
    return prepared


def _text_of(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text":
        raise InvalidRequest(f"{where} has the type {kind!r}; only parts of type `text` are served", param=f"{where}.type")
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequest(f"{where}.text must be a string", param=f"{where}.text")
    return text


def _tool_call(call: Any) -> Any:
    """With its arguments as an object if they are JSON of one; a model's broken JSON stays the string that it is."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = msgspec.json.decode(function["arguments"])
    except (msgspec.DecodeError, RecursionError):
        return call
    return call | {"function": function | {"arguments": arguments}} if isinstance(arguments, dict) else call
