"""A model's chat template: messages in, the prompt out, as text or as token ids in which only the template wrote special tokens.

The jinja2 environment is the one that model authors test against (transformers): sandboxed, blocks trimmed, `tojson` without HTML escapes,
`raise_exception`, `strftime_now`, `break` and `continue`, `generation` blocks. A template that cannot be compiled is a ModelError; one that
fails on given messages is an InvalidRequest, for templates refuse messages that way.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any, Final

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.environment import Template
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from relay.errors import InvalidRequest, ModelError
from relay.text.chat_messages import prepare_messages
from relay.text.template_marks import TemplateMarks
from relay.text.tokenizer import Tokenizer

MAX_RENDERED_CHARS: Final = 32 << 20  # several times what any context holds; a runaway template ends here

_OWN_NAMES: Final = frozenset({"messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "raise_exception", "strftime_now"})

# What Python code compiled from a template may raise on values that its author did not think of.
_TEMPLATE_FAULTS: Final = (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError)


class ChatTemplate:
    """One compiled template; threads may share it. specials: spellings of the special tokens that it may write."""

    def __init__(self, source: str, *, bos_token: str = "", eos_token: str = "", specials: Sequence[str] = ()) -> None:
        self._marks = TemplateMarks(specials, source)
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension, _Generation])
        environment.filters["tojson"] = _tojson
        environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        try:
            parsed = environment.parse(source)
            self._keep_parts, self._wrap_strings = _content_format(parsed)
            self._marks.mark(parsed)
            code = environment.compile(parsed)
        except TemplateSyntaxError as error:
            raise ModelError(f"the chat template does not compile, at line {error.lineno}: {error.message}") from error
        except (SyntaxError, RecursionError) as error:  # nested deeper than Python takes
            raise ModelError(f"the chat template does not compile: {error}") from error
        self._names_developer, self._names_calls = "developer" in source, "tool_calls" in source
        self._left_out: dict[str, bool] = {}  # whether the template leaves out messages of a role, of those that were asked about
        self._template = Template.from_code(environment, code, environment.make_globals(None))
        self._tokens = {"bos_token": self._marks.mark_whole(bos_token), "eos_token": self._marks.mark_whole(eos_token)}

    @classmethod
    def for_tokenizer(cls, source: str, tokenizer: Tokenizer) -> "ChatTemplate":
        """With the special tokens of a tokenizer. Raises ModelError for a template that builds its special tokens in a way that cannot be
        told from a user's text: plain messages must give the same ids as parsing the whole rendered text would."""
        template = cls(source, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token, specials=list(tokenizer.specials))
        for conversation in _PROBES:
            try:
                rendered = template.render(conversation)
            except InvalidRequest:
                continue  # the template refuses such messages, which is its right
            if encode_chat(tokenizer, template, conversation) != tokenizer.encode(rendered, special=True):
                raise ModelError("the chat template composes special tokens out of pieces in a way that is not known here")
        return template

    def render(self, messages: Sequence[dict[str, Any]], /, **options: Any) -> str:
        """The prompt as text. Options and errors are those of `render_split`."""
        return "".join(self.render_split(messages, **options))

    def render_split(
        self,
        messages: Sequence[dict[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Any] | None = None,
        **extra: Any,
    ) -> list[str]:
        """The prompt as text, special token, text, ..., text (`Tokenizer.encode_split`). Raises InvalidRequest.

        continue_final_message: the prompt ends with the last message's content, for the model to go on from there. extra: further names
        for the template, from a request's `chat_template_kwargs`.
        """
        for name in _OWN_NAMES.intersection(extra):
            raise InvalidRequest(f"`{name}` is set by the server; leave it out", param=f"chat_template_kwargs.{name}")
        self._refuse_what_would_vanish(messages)
        given = extra | {
            "messages": prepare_messages(
                messages,
                keep_parts=self._keep_parts,
                wrap_strings=self._wrap_strings,
                developer_is_system=not self._names_developer,
            ),
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
        }
        try:
            texts = list(_strings(given))
            way_out = self._marks.way_out(texts)
            if way_out:
                given = _moved(given, way_out)
            if continue_final_message:
                end = self._marks.free_char(texts, way_out)
                given["messages"][-1] = _ending_in(given["messages"][-1], end + " ")
                rendered = _until(self._run(given | self._tokens), end)
            else:
                rendered = self._run(given | self._tokens)
        except _TEMPLATE_FAULTS as error:
            reason = self._marks.unmark(str(error)) or type(error).__name__
            raise InvalidRequest(f"the model's chat template cannot take these messages: {reason}", param="messages") from error
        return self._marks.split(rendered, way_out)

    def _refuse_what_would_vanish(self, messages: Sequence[dict[str, Any]]) -> None:
        """Raises InvalidRequest for what the template would pass over in silence: the model would answer as if it had not been said."""
        for i, message in enumerate(messages):
            role = message.get("role")
            if role in ("tool", "function") and self._leaves_out(role):
                raise InvalidRequest(f"the model's chat template leaves out messages of the role {role}", param=f"messages[{i}].role")
            if message.get("tool_calls") and not self._names_calls:
                text = "the model's chat template knows no tool calls; write them into the content, as the model is to see them"
                raise InvalidRequest(text, param=f"messages[{i}].tool_calls")

    def _leaves_out(self, role: str) -> bool:
        """Found by trying. A template that refuses the trial may refuse the request in its own words."""
        if role not in self._left_out:
            self._left_out[role] = False  # while it is tried
            ask, said = {"role": "user", "content": "a"}, {"role": role, "name": "f", "content": "b"}
            with suppress(InvalidRequest):
                self._left_out[role] = self.render([ask, said]) == self.render([ask])
        return self._left_out[role]

    def _run(self, context: dict[str, Any]) -> str:
        pieces: list[str] = []
        n_chars = 0
        for piece in self._template.generate(context):
            n_chars += len(piece)
            if n_chars > MAX_RENDERED_CHARS:
                raise TemplateError(f"it writes more than {MAX_RENDERED_CHARS} characters")
            pieces.append(piece)
        return "".join(pieces)


def encode_chat(tokenizer: Tokenizer, template: ChatTemplate, messages: Sequence[dict[str, Any]], /, **options: Any) -> list[int]:
    """Token ids of a chat. Special tokens come from the template alone: spelled in a message or a tool they are text. The template writes
    BOS if the model wants it; none is added. Options and errors are those of `ChatTemplate.render_split`."""
    return tokenizer.encode_split(template.render_split(messages, **options))


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks what a model is trained on; when serving it is its content."""

    tags = {"generation"}  # noqa: RUF012 (the base class has it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _content_format(template: nodes.Template) -> tuple[bool, bool]:
    """Whether the template walks over content parts, and whether it does so without asking if the content is a string."""
    walks = any(_is_content(loop.iter) for loop in template.find_all(nodes.For))
    asks = any(test.name in ("string", "iterable", "sequence", "mapping") for test in template.find_all(nodes.Test))
    return walks, walks and not asks


def _is_content(node: nodes.Node) -> bool:
    match node:
        case nodes.Getattr(attr="content") | nodes.Getitem(arg=nodes.Const(value="content")) | nodes.Name(name="content"):
            return True
    return False


def _strings(value: Any) -> Iterator[str]:
    """Every string in what a user gave, however deep."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item)


def _moved(value: Any, way_out: dict[int, int]) -> Any:
    if isinstance(value, str):
        return value.translate(way_out)
    if isinstance(value, dict):
        return {_moved(key, way_out): _moved(item, way_out) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_moved(item, way_out) for item in value]
    return value


def _ending_in(message: dict[str, Any], end: str) -> dict[str, Any]:
    """The message with `end` after its content."""
    content = message["content"]
    if isinstance(content, str):
        return message | {"content": content + end}
    last = content[-1]["text"] if content else ""
    return message | {"content": [*content[:-1], {"type": "text", "text": last + end}]}


def _until(rendered: str, end: str) -> str:
    """What comes before `end`. A template that took the space behind it trims content, so what it would have trimmed goes as well."""
    before, found, after = rendered.rpartition(end)
    if not found:
        raise TemplateError("it leaves out the last message, so there is nothing to continue")
    return before if after.startswith(" ") else before.rstrip()


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


_PROBES: Final[tuple[list[dict[str, Any]], ...]] = (
    [{"role": "user", "content": "a"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}],
    [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}],
)
