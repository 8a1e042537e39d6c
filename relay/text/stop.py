"""Stop strings in one answer's text: where it ends, and what must be held back meanwhile.

Held back is only what a stop string may still be made of: the longest end of the text that begins some stop string. The search is an
Aho-Corasick automaton, one step per character however many and long the stop strings are, so the result cannot depend on how the text was
cut into chunks. The stop string that is complete first ends the answer; of those complete at the same character, the longest.
"""

from collections.abc import Iterable


class StopChecker:
    """Of one answer. `include_stop` leaves the stop string itself in the text."""

    __slots__ = ("_children", "_depth", "_fallback", "_first", "_held", "_include", "_length", "_state", "matched", "stopped")

    def __init__(self, stops: Iterable[str], include_stop: bool = False) -> None:
        self.stopped = False
        self.matched: str | None = None
        self._include = include_stop
        self._held = ""
        self._state = 0
        self._children: list[dict[str, int]] = [{}]
        self._depth = [0]  # of a state: characters that are held in it
        self._length = [0]  # of a state: of the longest stop string that ends in it, 0 for none
        self._fallback = [0]  # of a state: the state of its longest proper end
        for stop in stops:
            self._add(stop)
        self._first = frozenset(self._children[0])
        self._link()

    def push(self, text: str) -> tuple[str, bool]:
        """Take the next text; returns what may be sent now, and whether the answer has ended. What follows the end is dropped."""
        if self.stopped:
            return "", True
        state = self._state
        if not state and self._first.isdisjoint(text):
            return text, False
        children, fallback, length = self._children, self._fallback, self._length
        for i, char in enumerate(text):
            while state and char not in children[state]:
                state = fallback[state]
            state = children[state].get(char, 0)
            if length[state]:
                return self._stop(self._held + text[: i + 1], length[state]), True
        self._state = state
        whole = self._held + text
        cut = len(whole) - self._depth[state]
        self._held = whole[cut:]
        return whole[:cut], False

    def flush(self) -> str:
        """The end of the answer without a stop string: what was held back."""
        held, self._held, self._state = self._held, "", 0
        return held

    def _stop(self, whole: str, n_chars: int) -> str:
        self.stopped = True
        self.matched = whole[len(whole) - n_chars :]
        self._held = ""
        return whole if self._include else whole[: len(whole) - n_chars]

    def _add(self, stop: str) -> None:
        assert stop, "an empty stop string is refused with the request"
        state = 0
        for char in stop:
            following = self._children[state].get(char)
            if following is None:
                following = len(self._children)
                self._children[state][char] = following
                self._children.append({})
                self._depth.append(self._depth[state] + 1)
                self._length.append(0)
                self._fallback.append(0)
            state = following
        self._length[state] = len(stop)

    def _link(self) -> None:
        """Breadth first, so that a state's fallback is ready before those of its children."""
        states = list(self._children[0].values())
        for state in states:
            self._length[state] = self._length[state] or self._length[self._fallback[state]]
            for char, child in self._children[state].items():
                fallback = self._fallback[state]
                while fallback and char not in self._children[fallback]:
                    fallback = self._fallback[fallback]
                self._fallback[child] = self._children[fallback].get(char, 0)
                states.append(child)
