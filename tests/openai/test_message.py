"""Messages as chat templates get them."""

from typing import Any

import pytest

from relay.openai.fields import Fields
from relay.openai.message import ROLES, read_messages


def read(*messages: Any) -> tuple[dict[str, Any], ...]:
    return read_messages(Fields({"messages": list(messages)}))


@pytest.mark.parametrize("role", ROLES)
def test_every_role_is_kept(role: str) -> None:
    assert read({"role": role, "content": "x", "name": "bob"}) == ({"role": role, "content": "x", "name": "bob"},)


def test_text_parts_reach_the_template_and_nothing_else_of_them() -> None:
    """vllm#9358: parts were not made fit for templates that expect a string; `relay.text.chat_messages` does it."""
    parts = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": ""}]
    (message,) = read({"role": "user", "content": parts})
    assert message == {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": ""}]}


@pytest.mark.parametrize("nothing", [{}, {"content": None}])
def test_an_assistant_that_only_called_tools_has_empty_content(nothing: dict[str, Any]) -> None:
    """llama.cpp#13329: the template sliced a null content and crashed."""
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": [1, "é"]}'}}
    messages = read({"role": "assistant", "tool_calls": [call], **nothing}, {"role": "tool", "tool_call_id": "c1", "content": "5"})
    assert messages == (
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "5", "tool_call_id": "c1"},
    )


@pytest.mark.parametrize("arguments", [None, "", {}])
def test_a_call_without_arguments_has_none(arguments: Any) -> None:
    (message,) = read({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]})
    assert message["tool_calls"] == [{"id": "", "type": "function", "function": {"name": "f", "arguments": {}}}]


def test_what_templates_do_not_know_is_left_out_and_empty_text_is_kept() -> None:
    assert read({"role": "user", "content": "", "refusal": None, "audio": {"id": 1}, "tool_calls": []}) == (
        {"role": "user", "content": ""},
    )
