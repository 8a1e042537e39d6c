"""Where a reader of a resumable stream is: the `id` of each event, and what comes back as `Last-Event-ID`.

`CHOICE.TOKENS` for each choice, joined by `;`, and an `f` behind those whose finish has been told: `0.12;1.7f`.
"""

import re
from collections.abc import Mapping, Sequence

from relay.errors import InvalidRequest
from relay.http.choice import Choice, Seen
from relay.openai.options import MOST_CHOICES

_PART = re.compile(r"(\d{1,6})\.(\d{1,9})(f?)")


class Positions:
    """Of one stream, as its events go out."""

    def __init__(self, choices: Sequence[Choice]) -> None:
        self._seen = {choice.index: choice.replay for choice in choices}

    def mark(self, events: bytes, choice: Choice, *, finished: bool = False) -> bytes:
        """The events with the position behind them on the last one."""
        self._seen[choice.index] = Seen(choice.n_tokens, finished)
        name = ";".join(f"{index}.{seen.n_tokens}{'f' * seen.finished}" for index, seen in self._seen.items())
        at = events.rfind(b"\n\ndata: ") + 2 if b"\n\ndata: " in events else 0
        return b"%sid: %s\n%s" % (events[:at], name.encode(), events[at:])


def refuse_many(n_choices: int) -> None:
    """The position on each event tells of every choice, so bytes and time grow with the square of their number. Raises InvalidRequest."""
    if n_choices > MOST_CHOICES:
        raise InvalidRequest(
            f"a resumable stream may have {MOST_CHOICES} choices, of all its prompts together, and this one has {n_choices}; send fewer "
            "prompts, or leave out X-Relay-Resume",
            param="prompt",
        )


def check_position(seen: Mapping[int, Seen], choices: Sequence[Choice]) -> None:
    """Raises InvalidRequest for what no event of this stream can have said."""
    most = {choice.index: choice.flight.stopping.max_tokens for choice in choices}
    for index, each in seen.items():
        if each.n_tokens > most.get(index, -1):
            text = f"there is no choice {index}" if index not in most else f"choice {index} has {most[index]} tokens at most"
            raise InvalidRequest(f"Last-Event-ID is of another stream: {text}", param="Last-Event-ID")


def read_position(text: str) -> dict[int, Seen]:
    """What a client has seen of each choice; nothing for an empty one. Raises InvalidRequest."""
    seen = {}
    for part in text.split(";") if text else ():
        match = _PART.fullmatch(part)
        if match is None:
            raise InvalidRequest(
                f"Last-Event-ID is `{text[:64]}`; expected the id of an event of the stream, like 0.12", param="Last-Event-ID"
            )
        seen[int(match[1])] = Seen(int(match[2]), bool(match[3]))
    return seen
