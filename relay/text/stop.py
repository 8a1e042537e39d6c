"""Stop strings in one answer's text: where it ends, and what must be held back meanwhile.

Held back is only what a stop string may still be made of: the longest end of the text that begins some stop string. The search is an
Aho-Corasick automaton, one step per character however many and long the stop strings are, so the result cannot depend on how the text was
cut into chunks. The stop string that is complete first ends the answer; of those complete at the same character, the longest.
"""

from collections.abc import Iterable


class StopStrings:
    """The automaton of a request's stop strings: built once, then only read, by the checkers of all its choices.

    Of a state: `children` by character; `depth`, the characters that are held in it; `length` of the longest stop string that ends in it,
    0 for none; `fallback`, the state of its longest proper end. `first`: characters that stop strings begin with.
    """

    __slots__ = ("children", "depth", "fallback", "first", "length")

    def __init__(self, stops: Iterable[str]) -> None:
        self.children: list[dict[str, int]] = [{}]
        self.depth = [0]
        self.length = [0]
        self.fallback = [0]
        for stop in stops:
            self._add(stop)
        self.first = frozenset(self.children[0])
        self._link()

    def _add(self, stop: str) -> None:
        assert stop, "an empty stop string is refused with the request"
        state = 0
        for char in stop:
            following = self.children[state].get(char)
            if following is None:
                following = len(self.children)
                self.children[state][char] = following
                self.children.append({})
                self.depth.append(self.depth[state] + 1)
                self.length.append(0)
                self.fallback.append(0)
            state = following
        self.length[state] = len(stop)

    def _link(self) -> None:
        """Breadth first, so that a state's fallback is ready before those of its children."""
        states = list(self.children[0].values())
        for state in states:
            self.length[state] = self.length[state] or self.length[self.fallback[state]]
            for char, child in self.children[state].items():
                fallback = self.fallback[state]
                while fallback and char not in self.children[fallback]:
                    fallback = self.fallback[fallback]
                self.fallback[child] = self.children[fallback].get(char, 0)
                states.append(child)


class StopChecker:
    """Of one answer. `include_stop` leaves the stop string itself in the text."""

    __slots__ = ("_held", "_include", "_state", "_stops", "matched", "stopped")

    def __init__(self, stops: StopStrings, include_stop: bool = False) -> None:
        self.stopped = False
        self.matched: str | None = None
        self._stops, self._include = stops, include_stop
        self._held = ""
        self._state = 0

    def push(self, text: str, *, may_end: bool = True) -> tuple[str, bool]:
        """Take the next text; returns what may be sent now, and whether the answer has ended. What follows the end is dropped. A stop
        string that is complete where the answer may not end yet is text like any other."""
        if self.stopped:
            return "", True
        state, stops = self._state, self._stops
        if not state and stops.first.isdisjoint(text):
            return text, False
        children, fallback, length = stops.children, stops.fallback, stops.length
        for i, char in enumerate(text):
            while state and char not in children[state]:
                state = fallback[state]
            state = children[state].get(char, 0)
            if length[state] and may_end:
                return self._stop(self._held + text[: i + 1], length[state]), True
        self._state = state
        whole = self._held + text
        cut = len(whole) - stops.depth[state]
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
