"""Chat messages as clients send them, to messages as chat templates expect them.

Null or missing content becomes the empty string; content in parts becomes one string (joined by line breaks, as vLLM and llama.cpp do)
unless the template walks over parts itself; the arguments of tool calls become objects, since templates write them out as JSON. Nothing is
changed in place.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from relay.errors import InvalidRequest


def prepare_messages(messages: Sequence[dict[str, Any]], *, keep_parts: bool, wrap_strings: bool) -> list[dict[str, Any]]:
    """Copies of the messages, fit for a template. Raises InvalidRequest, naming the field, for content that is no text.

    keep_parts: the template walks over content parts. wrap_strings: and cannot deal with a plain string.
    """
    return [_message(message, f"messages[{i}]", keep_parts, wrap_strings) for i, message in enumerate(messages)]


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
