"""Tells the special tokens that a chat template writes from text of a user's that only spells them.

Each character that occurs in a special token has a twin in a private-use area. In the template's own constants, special tokens are replaced
by their twins before it is compiled; what users say goes in untouched, so that trimming, slicing and comparing work as ever. In the
rendered text twins can only be the template's: they become special tokens, and whatever spells one in plain characters, even across the
border of two strings, is text. Should a user's text hold twins, those characters are moved out of the way while rendering, one for one.

Some templates compose a special token around the role (`'<|' + message.role + '|>'`). The two halves get twins as well, and count as that
token only with exactly a role between them.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any, Final

from jinja2 import nodes

from relay.errors import InvalidRequest

ROLES: Final = ("system", "user", "assistant", "tool", "developer", "function", "observation")

# Arguments of these only search or compare: they must match what users wrote, which has no twins.
_SEARCHING_METHODS: Final = frozenset(
    ("startswith", "endswith", "removeprefix", "removesuffix", "strip", "lstrip", "rstrip", "split", "rsplit", "partition", "rpartition")
) | frozenset(("find", "rfind", "index", "rindex", "count", "get", "pop"))
_SEARCHING_FILTERS: Final = frozenset(
    ["trim", "select", "reject", "selectattr", "rejectattr", "map", "groupby", "attr", "sort", "unique", "sum", "min", "max"]
)

_PIECE_CHARS: Final = 64 << 10
_PRIVATE: Final = range(0xF0000, 0xFFFFE)


class TemplateMarks:
    """The twins of one template. specials: spellings of the special tokens. source: the template, whose characters are never twins."""

    def __init__(self, specials: Iterable[str], source: str) -> None:
        spellings = sorted(filter(None, specials), key=len, reverse=True)
        alphabet = sorted(set("".join(spellings)))
        private = [code for code in _PRIVATE if chr(code) not in source]
        twins = private[: len(alphabet)]
        self._free = private[len(alphabet) :]
        self._to_twin = {ord(char): twin for char, twin in zip(alphabet, twins, strict=True)}
        self._from_twin = {twin: ord(char) for char, twin in zip(alphabet, twins, strict=True)}
        self._twin_in = re.compile("[" + "".join(map(chr, twins)) + "]") if twins else None
        self._spelled = re.compile("|".join(map(re.escape, spellings))) if spellings else None
        halves = [tuple(special.split(role, 1)) for special in spellings for role in ROLES if role in special]
        whole_halves = {(left, right) for left, right in halves if left and right}
        self._left_half = _pattern(r"(?:{})\Z", (left for left, _ in whole_halves))
        self._right_half = _pattern(r"\A(?:{})", (right for _, right in whole_halves))
        by_role = [(left, role, right) for left, right in whole_halves for role in ROLES if left + role + right in set(spellings)]
        marked = [re.escape(self.mark_whole(special)) for special in spellings]
        marked += [re.escape(self.mark_whole(left)) + role + re.escape(self.mark_whole(right)) for left, role, right in by_role]
        self._marked = re.compile("(" + "|".join(marked) + ")") if marked else None

    def mark_whole(self, text: str) -> str:
        """The twins of all of a text."""
        return text.translate(self._to_twin)

    def unmark(self, text: str) -> str:
        """Plain characters for twins."""
        return text.translate(self._from_twin)

    def mark(self, template: nodes.Template) -> None:
        """Put twins into the constants of a parsed template, in place."""
        self._visit(template)

    def _visit(self, node: Any) -> None:
        match node:
            case nodes.TemplateData():
                node.data = self._constant(node.data)
            case nodes.Const(value=str()):
                node.value = self._constant(node.value)
            case nodes.Compare() | nodes.Test():
                return
            case nodes.Pair():
                self._visit(node.value)
            case nodes.Getitem():
                self._visit(node.node)
            case nodes.Call(node=nodes.Getattr(attr=name)):
                self._visit(node.node)
                self._visit_arguments(node, name == "replace", name in _SEARCHING_METHODS)
            case nodes.Filter():
                if node.node is not None:
                    self._visit(node.node)
                self._visit_arguments(node, node.name == "replace", node.name in _SEARCHING_FILTERS)
            case _:
                for child in node.iter_child_nodes():
                    self._visit(child)

    def _visit_arguments(self, node: Any, replaces: bool, searches: bool) -> None:
        if searches:
            return
        for argument in [*node.args[1 if replaces else 0 :], *node.kwargs]:
            self._visit(argument)

    def _constant(self, text: str) -> str:
        """A constant of the template, with twins for the special tokens in it and for a half of one at its ends."""
        for pattern in (self._spelled, self._left_half, self._right_half):
            if pattern is not None:
                text = pattern.sub(lambda found: self.mark_whole(found[0]), text)
        return text

    def way_out(self, texts: Iterable[str]) -> dict[int, int]:
        """For users' texts with twins in them: where each such character goes while rendering. Empty as good as always."""
        if self._twin_in is None:
            return {}
        hostile = {char for piece in _pieces(texts) if self._twin_in.search(piece) for char in piece if self._twin_in.match(char)}
        if not hostile:
            return {}
        taken = set().union(*_pieces(texts))
        free = [code for code in self._free if chr(code) not in taken][: len(hostile)]
        if len(free) < len(hostile):
            raise _no_free_character()
        return dict(zip(map(ord, sorted(hostile)), free, strict=True))

    def free_char(self, texts: Iterable[str], way_out: dict[int, int]) -> str:
        """A character that is neither a twin nor anywhere in the template, in users' texts or on their way out."""
        taken = set().union(*_pieces(texts)) | set(map(chr, way_out.values()))
        for code in self._free:
            if chr(code) not in taken:
                return chr(code)
        raise _no_free_character()

    def split(self, rendered: str, way_out: dict[int, int]) -> list[str]:
        """Rendered text as text, special token, text, ..., text, all in plain characters again."""
        parts = self._marked.split(rendered) if self._marked is not None else [rendered]
        back = self._from_twin | {new: old for old, new in way_out.items()}
        return ["".join([piece.translate(back) for piece in _pieces([part])]) for part in parts]


def _pieces(texts: Iterable[str]) -> Iterator[str]:
    """Texts cut where they are long: re and str keep the GIL to the end of one, 0.3 s for a prompt of 8 MiB."""
    for text in texts:
        for start in range(0, len(text), _PIECE_CHARS):
            yield text[start : start + _PIECE_CHARS]


def _no_free_character() -> InvalidRequest:
    return InvalidRequest("the messages use up all private-use characters of plane 15, of which some must be free", param="messages")


def _pattern(frame: str, halves: Iterable[str]) -> re.Pattern[str] | None:
    longest_first = sorted(set(halves), key=len, reverse=True)
    return re.compile(frame.format("|".join(map(re.escape, longest_first)))) if longest_first else None
