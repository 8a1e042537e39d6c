"""The `messages` of a chat request, validated and freed of what templates do not know.

Out come dicts with `role`, `content` (a string, or an array of text parts as it was sent; null is "") and where given `name`,
`tool_call_id` and `tool_calls`. Which form of content and of arguments a template wants is known to `relay.text.chat_messages`.
"""

from typing import Any

from relay.openai.fields import Fields, wrong

Message = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_MOST_NAME = 1024  # of names and ids, in characters
_MOST = 1 << 26  # of anything in a body: the cap on the body's bytes comes first


def read_messages(fields: Fields) -> tuple[Message, ...]:
    """At least one message. Raises InvalidRequest."""
    messages = fields.array("messages", _MOST)
    if not messages:
        raise fields.wrong("messages", "an array of at least one message")
    return tuple(_message(f"messages[{i}]", message) for i, message in enumerate(messages))


def _message(at: str, value: Any) -> Message:
    if not isinstance(value, dict):
        raise wrong(at, "an object with `role` and `content`", value)
    fields = Fields(value, at)
    role = fields.get("role")
    if role not in ROLES:
        raise fields.wrong("role", "one of " + ", ".join(ROLES))
    message: Message = {"role": role, "content": _content(fields, role)}
    for name in ("name", "tool_call_id"):
        text = fields.string(name, _MOST_NAME, None)
        if text is not None:
            message[name] = text
    calls = fields.array("tool_calls", 1024)
    if calls:
        message["tool_calls"] = [_tool_call(f"{at}.tool_calls[{j}]", call) for j, call in enumerate(calls)]
    return message


def _content(fields: Fields, role: str) -> str | list[dict[str, str]]:
    match fields.get("content"):
        case str() as text:
            return text
        case None if role == "assistant":
            return ""
        case [_, *_] as parts:
            at = fields.path("content")
            return [{"type": "text", "text": _text(f"{at}[{j}]", part, role)} for j, part in enumerate(parts)]
        case _:
            raise fields.wrong("content", "a string or an array of at least one text part")


def _text(at: str, value: Any, role: str) -> str:
    """Of a part; what an assistant refused to say is text of its turn."""
    if not isinstance(value, dict):
        raise wrong(at, 'an object like {"type": "text", "text": "..."}', value)
    part = Fields(value, at)
    kind = "refusal" if role == "assistant" and part.get("type") == "refusal" else "text"
    if part.get("type") != kind:
        raise part.wrong("type", '"text"; other parts are not served here')
    text = part.string(kind, _MOST, None)
    if text is None:
        raise part.wrong(kind, "a string")
    return text


def _tool_call(at: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise wrong(at, "an object with `id`, `type` and `function`", value)
    call = Fields(value, at)
    if call.get("type") not in (None, "function"):
        raise call.wrong("type", '"function"')
    function = call.object("function")
    if function is None:
        raise call.wrong("function", "an object with `name` and `arguments`")
    name = function.string("name", _MOST_NAME, None)
    if not name:
        raise function.wrong("name", "the name of a function")
    arguments = function.get("arguments")
    if arguments is not None and not isinstance(arguments, (str, dict)):
        raise function.wrong("arguments", "a JSON object, or one in a string")
    return {"id": call.string("id", _MOST_NAME, ""), "type": "function", "function": {"name": name, "arguments": arguments or {}}}
