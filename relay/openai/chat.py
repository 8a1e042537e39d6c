"""`POST /v1/chat/completions`: a body in, a validated `ChatRequest` out.

`add_generation_prompt` opens the assistant's turn after the messages; `continue_final_message` instead leaves the last message, which
must be the assistant's, unfinished. One excludes the other, and the first is the default.
"""

from typing import Any

import msgspec

from relay.errors import InvalidRequest
from relay.openai.body import parse_object
from relay.openai.fields import Fields
from relay.openai.message import Message, read_messages
from relay.openai.options import Options, read_options
from relay.openai.sampling import read_chat_logprobs
from relay.openai.unserved import CHAT, refuse_unserved

_TEMPLATE_OWN = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize")


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`messages` and `template_kwargs` are what the chat template is given."""

    options: Options
    messages: tuple[Message, ...]
    add_generation_prompt: bool
    continue_final_message: bool
    template_kwargs: dict[str, Any]

    def check(self, vocab_size: int) -> None:
        """Raises InvalidRequest if it names token ids that the model does not have."""
        self.options.check(vocab_size)


def parse_chat(body: bytes) -> ChatRequest:
    """Raises InvalidRequest."""
    fields = Fields(parse_object(body))
    refuse_unserved(fields, CHAT)
    messages = read_messages(fields)
    continued = fields.flag("continue_final_message", False)
    opened = fields.flag("add_generation_prompt", not continued)
    if continued and opened:
        raise InvalidRequest(
            "`continue_final_message` and `add_generation_prompt` are both true; send one of them", param="continue_final_message"
        )
    if continued and messages[-1]["role"] != "assistant":
        raise InvalidRequest(
            "`continue_final_message` needs a last message of the role assistant, to go on from", param="continue_final_message"
        )
    return ChatRequest(
        options=read_options(fields, logprobs=read_chat_logprobs(fields), least_tokens=1, best_of=None),
        messages=messages,
        add_generation_prompt=opened,
        continue_final_message=continued,
        template_kwargs=_template_kwargs(fields),
    )


def _template_kwargs(fields: Fields) -> dict[str, Any]:
    if fields.object("chat_template_kwargs") is None:
        return {}
    kwargs: dict[str, Any] = fields.get("chat_template_kwargs")
    for name in _TEMPLATE_OWN:
        if name in kwargs:
            raise InvalidRequest(
                f"`chat_template_kwargs` has the key `{name}`, which the server gives to the template itself; leave it out",
                param=f"chat_template_kwargs.{name}",
            )
    return kwargs
