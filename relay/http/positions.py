"""Where a reader of a resumable stream is: the `id` of each event, and what comes back as `Last-Event-ID`.

`CHOICE.TOKENS` for each choice, joined by `;`, and an `f` behind those whose finish has been told: `0.12;1.7f`.
"""

import re
from collections.abc import Sequence

from relay.errors import InvalidRequest
from relay.http.choice import Choice, Seen

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
